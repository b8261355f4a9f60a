# Scrubs the working directory of a sandbox before an agent comes: POSIX sh, as the sandbox's user; $HISTORY is base or
# none. Ends with an exit code that is not 0 if something that must go cannot.
#
# A repository is not cleaned but made anew, from what its HEAD reaches: what nothing copies (refs, reflogs, stashes,
# notes, loose and packed objects, alternates, hooks, config, worktrees, modules, FETCH_HEAD, ...) cannot be forgotten.
set -eu
umask 022
top=$(pwd -P)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR || :
export HOME="$scratch" GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$scratch/.gitconfig" GIT_NO_REPLACE_OBJECTS=1
export GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0
printf '[safe]\n\tdirectory = *\n[core]\n\tlogAllRefUpdates = false\n' >"$HOME/.gitconfig"
has_git=$(command -v git || :)
kept_config='user.name user.email core.filemode core.autocrlf core.eol core.symlinks core.ignorecase'

# Every file system of a machine is not a project.
search() {
    if [ "$top" = / ]; then
        find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /usr -o -path '/lib*' -o -path /opt -o -path /var \) \
            -prune -o "$@" 2>/dev/null || :
    else
        find "$top" "$@" 2>/dev/null || : # what its user cannot enter, the agent cannot either
    fi
}

# The object stores of other repositories from which the one in $1 borrows.
borrowed() {
    [ -f "$1/info/alternates" ] || return 0
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        /*/objects | /*/objects/) echo "${line%/}" ;;
        [!/#]*/objects | [!/#]*/objects/) (cd "$1" && cd "$line" && pwd -P) 2>/dev/null || : ;;
        esac
    done <"$1/info/alternates"
}

# A copy, in $scratch/$1, of what git may see of a repository (its own folder: $2, the one that worktrees share: $3).
# Config and hooks can run programs, and grafts lie about parents.
bare_view() {
    mkdir -p "$scratch/$1/refs" "$scratch/$1/objects/info"
    { [ "$format" = sha1 ] && printf '[core]\n\trepositoryformatversion = 0\n' ||
        printf '[core]\n\trepositoryformatversion = 1\n[extensions]\n\tobjectformat = sha256\n'; } >"$scratch/$1/config"
    { echo "$3/objects" && borrowed "$3/objects"; } >"$scratch/$1/objects/info/alternates"
    [ ! -d "$3/refs" ] || cp -R "$3/refs/." "$scratch/$1/refs/" 2>/dev/null || :
    for name in packed-refs shallow; do [ ! -f "$3/$name" ] || cp "$3/$name" "$scratch/$1/$name"; done
    for name in HEAD index; do [ ! -f "$2/$name" ] || cp "$2/$name" "$scratch/$1/$name"; done
}

# Makes $scratch/new/.git of what HEAD of a repository reaches; $1 and $2 as above, $3: its working tree.
anew() {
    rm -rf "$scratch/new" "$scratch/old"
    bare_view old "$1" "$2"
    old="git --git-dir=$scratch/old" new="git --git-dir=$scratch/new/.git"
    base=$($old rev-parse -q --verify 'HEAD^{commit}' 2>/dev/null) || return 1
    branch=$($old symbolic-ref -q --short HEAD || :)
    if [ "$HISTORY" = none ]; then
        base=$(GIT_AUTHOR_NAME=dev GIT_AUTHOR_EMAIL=dev@localhost GIT_AUTHOR_DATE='1700000000 +0000' \
            GIT_COMMITTER_NAME=dev GIT_COMMITTER_EMAIL=dev@localhost GIT_COMMITTER_DATE='1700000000 +0000' \
            $old commit-tree -m 'Initial commit' "$base^{tree}") || return 1
    fi
    [ "$format" = sha1 ] || export GIT_DEFAULT_HASH="$format"
    git init -q --template= "$scratch/new" || return 1
    unset GIT_DEFAULT_HASH
    mkdir -p "$scratch/new/.git/objects/pack"
    echo "$base" | $old pack-objects -q --revs "$scratch/new/.git/objects/pack/pack" >/dev/null || return 1
    if [ "$HISTORY" = base ] && [ -f "$scratch/old/shallow" ]; then
        while IFS= read -r line; do
            ! $new cat-file -e "$line" 2>/dev/null || echo "$line"
        done <"$scratch/old/shallow" >"$scratch/new/.git/shallow"
    fi
    for key in $kept_config; do
        ! value=$(git config -f "$2/config" --no-includes --get "$key" 2>/dev/null) || $new config "$key" "$value"
    done
    if [ -n "$branch" ]; then
        $new symbolic-ref HEAD "refs/heads/$branch" && $new update-ref "refs/heads/$branch" "$base" || return 1
    else
        $new update-ref --no-deref HEAD "$base" || return 1
    fi
    # The old index can name objects, too.
    $new read-tree HEAD || return 1
    $new --work-tree="$3" update-index -q --refresh >/dev/null 2>&1 || :
}

# $private and $common of the repository whose .git is $1; the working tree of one that others share has a file there.
resolve() {
    private=$1
    if [ -f "$1" ]; then
        private=$(sed -n 's/^gitdir: //p' "$1" | head -n 1)
        case $private in /*) ;; *) private=$(dirname "$1")/$private ;; esac
    fi
    private=$(cd "$private" 2>/dev/null && pwd -P || echo "$private")
    common=$private
    if [ -f "$private/commondir" ]; then
        common=$(head -n 1 "$private/commondir")
        case $common in /*) ;; *) common=$private/$common ;; esac
        common=$(cd "$common" 2>/dev/null && pwd -P || echo "$common")
    fi
    format=$(git config -f "$common/config" --no-includes extensions.objectformat 2>/dev/null || echo sha1)
}

scrub_repository() {
    resolve "$1"
    tree=$(dirname "$1")
    borrowed "$common/objects" >>"$scratch/elsewhere"
    case $private in
    */worktrees/*) [ "$tree" = "$top" ] || { rm -rf "$tree"; return; } ;; # another state of the code, checked out beside it
    esac
    case $private in */modules/*) is_module=1 ;; *) is_module= ;; esac
    if [ -n "$has_git" ] && [ -z "$is_module" ] && [ -d "$common/objects" ] && anew "$private" "$common" "$tree"; then
        rm -rf "$1"
        cp -R "$scratch/new/.git" "$1"
    else # without git, or without a commit, there is no history that may stay
        rm -rf "$1"
    fi
    [ "$private" = "$1" ] || echo "$private" >>"$scratch/elsewhere"
    [ "$common" = "$private" ] || case $common in *.git) echo "$common" >>"$scratch/elsewhere" ;; esac
}

# What is left of git elsewhere, unless it is a repository that was scrubbed itself.
remove_elsewhere() {
    while IFS= read -r path; do
        [ -n "$path" ] && [ -e "$path" ] || continue
        ! grep -qxF -e "$path" -e "${path%/objects}" "$scratch/repositories" || continue
        rm -rf "$path"
    done <"$scratch/elsewhere"
}

# What only a repository can tell: files that it does not keep.
list_untracked() {
    [ -n "$has_git" ] || return 0
    resolve "$1"
    tree=$(dirname "$1")
    rm -rf "$scratch/look"
    bare_view look "$private" "$common"
    (cd "$tree" && git --git-dir="$scratch/look" --work-tree="$tree" -c core.quotePath=false \
        ls-files --others --directory 2>/dev/null) | sed "s|^|$tree/|;s|/\$||" >>"$scratch/untracked" || :
}

is_editable_install() { # it needs its metadata
    for place in $(python3 -I -c 'import sys; print("\n".join(sys.path))' 2>/dev/null); do
        ! grep -qsF "$1" "$place"/*.egg-link "$place"/easy-install.pth || return 0
    done
    return 1
}

remove_untracked() {
    while IFS= read -r path; do
        case ${path##*/} in
        build | dist | target | site | _build | htmlcov | coverage.xml | *.orig | *.rej | *~) rm -rf "$path" ;;
        *.tar | *.tar.* | *.tgz | *.tbz2 | *.txz | *.zip | *.whl | *.patch | *.diff) rm -rf "$path" ;;
        *.egg-info) is_editable_install "$(dirname "$path")" || rm -rf "$path" ;;
        esac
        [ ! -e "$path" ] || packs_in "$path" | while IFS= read -r pack; do rm -f "$pack"; done
    done <"$scratch/untracked"
}

# Bundles and packs, whatever their names: by what they begin with.
packs_in() {
    find "$1" \( -name node_modules -o -name .git \) -prune -o -type f -exec grep -ls -e '^# v[23] git bundle' -e '^PACK' {} + 2>/dev/null |
        while IFS= read -r pack; do
            case $(head -c 6 "$pack" 2>/dev/null | tr -d '\000-\010') in '# v2 g' | '# v3 g' | PACK | PACK?) echo "$pack" ;; esac
        done || :
}

# Repositories of any other name than .git, which an outer one does not keep as a fixture.
bare_repositories() {
    search -name .git -prune -o -type f -name HEAD -print | while IFS= read -r head; do
        folder=$(dirname "$head")
        [ "$folder" != "$top" ] && [ -d "$folder/objects" ] && [ -d "$folder/refs" ] || continue
        (cd "$(dirname "$folder")" && git ls-files --error-unmatch -- "$head") >/dev/null 2>&1 || echo "$folder"
    done
}

# What tools keep of other states of the code, and is never part of it.
caches() {
    search -name .git -prune -o -type d \( -name __pycache__ -o -name .mypy_cache -o -name .pytest_cache \
        -o -name .ruff_cache -o -name .hypothesis -o -name .pytype -o -name .pyre -o -name .tox -o -name .nox \
        -o -name .eggs -o -name .nyc_output -o -name .history -o -path '*/.idea/shelf' -o -name .ipynb_checkpoints -o -name .hg -o -name .svn \
        -o -path '*/node_modules/.cache' \) -prune "$@"
}
traces() {
    search -name .git -prune -o -type f \( -name '*.pyc' -o -name '*.pyo' -o -name .coverage -o -name '.coverage.*' \
        -o -name '.*.sw[a-p]' -o -name '.#*' -o -name '#*#' -o -name .DS_Store -o -name .testmondata \
        -o -name .dmypy.json -o -name '.*.un~' -o -name '.*.~undo-tree~' \) "$@"
}

: >"$scratch/untracked"
: >"$scratch/elsewhere"
search -name .git -prune -print >"$scratch/found"
# Inner repositories first: what they need of outer ones is still there.
awk '{ print length($0) "\t" $0 }' "$scratch/found" | sort -rn | cut -f 2- >"$scratch/repositories"
while IFS= read -r where; do list_untracked "$where"; done <"$scratch/repositories"
remove_untracked
while IFS= read -r where; do scrub_repository "$where"; done <"$scratch/repositories"
remove_elsewhere
bare_repositories | while IFS= read -r path; do rm -rf "$path"; done
caches -exec rm -rf {} +
traces -exec rm -f {} +
# A backup beside its original, unless a repository (a clean one by now) keeps it.
search -name .git -prune -o -type f \( -name '*.orig' -o -name '*.rej' -o -name '*~' \) -print |
    while IFS= read -r path; do
        original=${path%.orig}
        original=${original%.rej}
        [ ! -e "${original%\~}" ] || (cd "$(dirname "$path")" && git ls-files --error-unmatch -- "$path") \
            >/dev/null 2>&1 || rm -f "$path"
    done

left=$(bare_repositories; caches -print; traces -print; while IFS= read -r path; do
    [ ! -e "$path" ] || grep -qxF -e "$path" -e "${path%/objects}" "$scratch/repositories" || echo "$path"
done <"$scratch/elsewhere")
[ -z "$left" ] || { echo "these cannot be removed: $left" | head -c 500 >&2; exit 1; }
