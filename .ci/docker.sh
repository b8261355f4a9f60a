#!/usr/bin/env bash
# Starts a Docker engine for tests where there is none, as root and beside everything else: its data, its socket and
# its containerd lie in one folder, it makes no bridge and no firewall rule, and containers have no network.
#
#   .ci/docker.sh start FOLDER     prints the engine's address; does nothing where it runs already
#   .ci/docker.sh start FOLDER PORT CERTIFICATES
#                                  the same, and it listens on loopback too, to clients with a certificate: there are
#                                  ca.pem, server-cert.pem and server-key.pem in that folder
#   .ci/docker.sh stop FOLDER      ends it with all its containers, and leaves no process, mount or control group
#
# Where there can be none, it says why in one line and ends with 3.
set -euo pipefail
export LC_ALL=C.UTF-8

no_engine() { printf 'no Docker engine for tests: %s\n' "$1" >&2; exit 3; }
usage() { printf 'usage: %s start FOLDER [PORT CERTIFICATES] | stop FOLDER\n' "$0" >&2; exit 2; }

(($# == 2)) || [[ $# == 4 && $1 == start ]] || usage
tls=()
if (($# == 4)); then
    tls=(--host "tcp://127.0.0.1:$3" --tlsverify "--tlscacert=$4/ca.pem" "--tlscert=$4/server-cert.pem" "--tlskey=$4/server-key.pem")
fi
what=$1
folder=$(realpath -m "$2")
socket=$folder/docker.sock
log=$folder/dockerd.log
# Socket paths have 107 bytes at most, and containerd's are the longest below the folder.
group=composer-engine-$(printf %s "$folder" | cksum | cut -d' ' -f1)

answers() { [[ -S $socket ]] && curl -sf --max-time 2 --unix-socket "$socket" http://docker/_ping >/dev/null 2>&1; }

# A zombie has ended, whoever fails to collect it.
runs() { [[ $(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null || true) == [!Z] ]]; }

install() {
    command -v dockerd >/dev/null && command -v curl >/dev/null && return
    command -v apt-get >/dev/null || no_engine "dockerd or curl is not installed, and there is no apt-get to install it with"
    local packages=(docker.io iptables curl)
    # RUNLEVEL: the package is not to start an engine of its own.
    local get=(apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60)
    export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
    "${get[@]}" install -y --no-install-recommends "${packages[@]}" >"$log" 2>&1 ||
        { "${get[@]}" update && "${get[@]}" install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1 ||
        no_engine "docker.io cannot be installed: $(grep -aE '^[EW]:' "$log" | tail -n1)"
}

start() {
    if answers; then echo "unix://$socket"; return; fi
    [[ $(uname -s) == Linux ]] || no_engine "this is $(uname -s)"
    ((EUID == 0)) || no_engine "dockerd needs root, and this is $(id -un)"
    ((${#folder} <= 60)) || no_engine "the folder's path is too long for sockets: $folder"
    mkdir -p "$folder"
    for controller in memory pids; do
        awk -v name="$controller" '$1 == name && $4 == 1 { found = 1 } END { exit !found }' /proc/cgroups ||
            grep -qw "$controller" /sys/fs/cgroup/cgroup.controllers 2>/dev/null ||
            no_engine "the kernel has no control group '$controller'"
    done
    install
    # One that was killed leaves its number behind, and so does a zombie.
    for file in "$folder/dockerd.pid" "$folder/exec/containerd/containerd.pid"; do
        [[ -f $file ]] && ! runs "$(cat "$file")" && rm -f "$file"
    done
    setsid dockerd --host "unix://$socket" "${tls[@]}" --data-root "$folder/data" --exec-root "$folder/exec" \
        --pidfile "$folder/dockerd.pid" --cgroup-parent "/$group" --bridge=none --iptables=false --ip6tables=false \
        --ip-forward=false --ip-masq=false --userland-proxy=false --log-driver none --log-level warn \
        </dev/null >>"$log" 2>&1 &
    local pid=$!
    for _ in $(seq 300); do
        if answers; then echo "unix://$socket"; return; fi
        runs "$pid" || no_engine "dockerd ended: $(grep -a . "$log" | tail -n1 | cut -c1-300)"
        sleep 0.1
    done
    stop
    no_engine "dockerd did not answer within 30 s; its log was: $(tail -n1 "$log" 2>/dev/null | cut -c1-300)"
}

stop() {
    [[ -d $folder ]] || return 0
    local pid
    if answers; then
        for id in $(curl -s --max-time 10 --unix-socket "$socket" 'http://docker/v1.41/containers/json?all=1' | grep -oE '"Id":"[0-9a-f]{64}"' | cut -d'"' -f4); do
            curl -s --max-time 10 -X DELETE --unix-socket "$socket" "http://docker/v1.41/containers/$id?force=1&v=1" >/dev/null || true
        done
    fi
    for file in "$folder/dockerd.pid" "$folder/exec/containerd/containerd.pid"; do
        pid=$(cat "$file" 2>/dev/null || true)
        [[ -n $pid ]] || continue
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 150); do runs "$pid" || break; sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null || true
    done
    # Shims outlive the engine by design; they are known by the folder in their command lines.
    for pid in $(grep -alF -- "$folder/" /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); do
        if { tr '\0' ' ' <"/proc/$pid/cmdline"; } 2>/dev/null | grep -q '^[^ ]*containerd'; then kill -KILL "$pid" 2>/dev/null || true; fi
    done
    awk -v top="$folder/" 'index($5, top) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r place; do
        umount -l "$place" 2>/dev/null || true
    done
    for _ in $(seq 20); do
        find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} + 2>/dev/null || true
        [[ -n $(find /sys/fs/cgroup -type d -name "$group" 2>/dev/null) ]] || break
        sleep 0.1
    done
    rm -rf "$folder"
}

case $what in
start) start ;;
stop) stop ;;
*) usage ;;
esac
