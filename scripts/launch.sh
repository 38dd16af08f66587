# Sourced by the launch scripts.

# Prints the comment at the head of the script, and ends it.
usage() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}

# run COMMAND…: runs it in place of this shell; with DRY_RUN=1 prints it, quoted, a flag a line.
run() {
    [[ ${DRY_RUN:-0} == 1 ]] || exec "$@"
    printf '%q' "$1"
    local word last=$1
    for word in "${@:2}"; do
        # A flag's value stands behind it.
        [[ $last == -* && $word != -* ]] || printf ' \\\n   '
        printf ' %q' "$word"
        last=$word
    done
    printf '\n'
}
