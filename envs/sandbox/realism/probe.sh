# Gathers facts that tell a sandbox from a computer that somebody uses. Runs inside, as the agent would run it; needs a
# POSIX shell and coreutils or busybox. Prints one `name<TAB>value` a line; what cannot be found out is empty.
# What a fact means is decided outside (tells.py).
export LC_ALL=C
say() { printf '%s\t%s\n' "$1" "$(printf '%s' "$2" | tr '\n\t' '  ')"; }
words() { tr '\0' ' ' <"$1" 2>/dev/null; }
first() { head -n1 "$1" 2>/dev/null; }
count() { ls -A "$1" 2>/dev/null | wc -l; }
status() { sed -n "s/^$1:[[:space:]]*//p" /proc/self/status 2>/dev/null; }
present() { for f in "$@"; do [ -e "$f" ] && printf '%s ' "$f"; done; }

# Marks and the environment
say marks "$(present /.dockerenv /run/.containerenv /.singularity.d /dockerinit)"
say env.container "${container:-}$(words /proc/1/environ | tr ' ' '\n' | sed -n 's/^container=//p')"
for v in USER LOGNAME LANG TERM SHELL HOME PATH PWD SHLVL; do eval "say env.$v \"\${$v:-}\""; done
say env.names "$(env | sed -n 's/^\([A-Za-z_0-9]*\)=.*/\1/p' | sort | tr '\n' ' ')"

# Processes
say pid1.name "$(first /proc/1/comm)"
say pid1.command "$(words /proc/1/cmdline)"
say pid1.start_s "$(sed 's/.*) //' /proc/1/stat 2>/dev/null | cut -d' ' -f20 | sed 's/..$//')"
say pid2.name "$(first /proc/2/comm)"
say processes "$(ls -d /proc/[0-9]* 2>/dev/null | wc -l)"
say uptime_s "$(cut -d. -f1 /proc/uptime 2>/dev/null)"
say parent.name "$(first /proc/$PPID/comm)"
say parent.pid "$PPID"
say tty "$(tty 2>/dev/null)"
say loginuid "$(first /proc/self/loginuid)"
say oom_score_adj "$(first /proc/self/oom_score_adj)"
say limit.file "$(ulimit -f 2>/dev/null)"
say limit.cpu "$(ulimit -t 2>/dev/null)"

# Namespaces, mounts, devices
say ns.pid "$(readlink /proc/self/ns/pid)"
say ns.user "$(readlink /proc/self/ns/user)"
say uid_map "$(tr -s ' ' </proc/self/uid_map 2>/dev/null)"
say cgroup "$(cat /proc/1/cgroup /proc/self/cgroup 2>/dev/null | sort -u)"
say root.mount "$(awk '$2=="/"{print $3, $1}' /proc/mounts 2>/dev/null | tail -n1)"
say root.subpath "$(awk '$5=="/"{print $4}' /proc/self/mountinfo 2>/dev/null | tail -n1)"
say root.options "$(awk '$2=="/"{print $4}' /proc/mounts 2>/dev/null | tail -n1)"
say mounts.masked "$(awk '$5~/^\/(etc\/(hosts|hostname|resolv.conf)|proc\/(kcore|keys|timer_list|sched_debug|acpi|scsi|latency_stats|timer_stats)|sys\/firmware)$/{print $5}' /proc/self/mountinfo 2>/dev/null)"
say mounts.sources "$(grep -Eo '(lowerdir|upperdir|workdir)=[^, ]*|/var/lib/(docker|containers)[^ ,]*|/newroot[^ ,]*|/oldroot[^ ,]*' /proc/self/mountinfo 2>/dev/null | sort -u | head -n5)"
say sys.class "$([ -d /sys/class ] && echo yes)"
say sys.options "$(awk '$2=="/sys"{print $4}' /proc/mounts 2>/dev/null)"
say dev "$(count /dev)"
say block_devices "$(count /sys/block)"

# Rights
say uid "$(id -u)"
say groups "$(id -Gn 2>/dev/null)"
say capabilities "$(status CapBnd)"
say no_new_privileges "$(status NoNewPrivs)"
say seccomp "$(status Seccomp)"
say setuid_root "$([ "$(stat -c %u /usr/bin/su 2>/dev/null)" = 0 ] && [ -u /usr/bin/su ] && echo yes)"

# Who and where
say hostname "$(first /proc/sys/kernel/hostname)"
say machine_id "$(first /etc/machine-id)"
say timezone "$(present /etc/localtime)"
say passwd.self "$(grep "^[^:]*:[^:]*:$(id -u):" /etc/passwd 2>/dev/null)"
say passwd.lines "$(wc -l </etc/passwd 2>/dev/null)"
say etc.owner "$(stat -c %u /etc 2>/dev/null)"
say home.writable "$([ -n "${HOME:-}" ] && [ -w "$HOME" ] && echo yes)"
say home.history "$(wc -l <"${HOME:-/none}/.bash_history" 2>/dev/null)"
say home.gitconfig "$(git config --global user.email 2>/dev/null || sed -n 's/.*email *= *//p' "${HOME:-/none}/.gitconfig" 2>/dev/null)"
say home.entries "$(count "${HOME:-/none}")"
say hosts "$(grep -vc '^#' /etc/hosts 2>/dev/null)"

# Network
say net.interfaces "$(ls /sys/class/net 2>/dev/null || awk -F: 'NR>2{print $1}' /proc/net/dev 2>/dev/null)"
say net.routes "$(awk 'NR>1' /proc/net/route 2>/dev/null | wc -l)"
say net.loopback "$(awk '$1~/0100007F/' /proc/net/fib_trie 2>/dev/null; grep -c 127.0.0.1 /proc/net/fib_trie 2>/dev/null)"
say net.resolver "$(sed -n 's/^nameserver *//p' /etc/resolv.conf 2>/dev/null | head -n1)"

# Traces of use
say files.dates "$(find /etc /home /usr/local /opt -xdev -type f -printf '%TY%Tm%Td\n' 2>/dev/null | sort | uniq -c | sort -rn | awk '{s+=$1; if(NR==1)m=$1} END{if(s)print int(100*m/s)}')"
say logs "$(find /var/log -type f -size +0 2>/dev/null | wc -l)"
say manuals "$(count /usr/share/man/man1)"
say package_list "$(wc -l </var/lib/dpkg/status 2>/dev/null || count /var/lib/rpm)"
say boot "$(count /boot)"
say temporary "$(count /tmp)"
say tools.missing "$(for t in sudo curl less vi man ssh ps ip make systemctl git python3; do command -v $t >/dev/null 2>&1 || printf '%s ' $t; done)"

# The machine
say kernel "$(uname -r) $(words /proc/version)"
say hypervisor "$(grep -m1 -o '^flags.* hypervisor' /proc/cpuinfo 2>/dev/null | grep -o hypervisor)"
say cmdline "$(words /proc/cmdline | cut -c1-300)"
say cpu_quota "$(cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null | head -n1)"
say memory_limit "$(cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null | head -n1)"
