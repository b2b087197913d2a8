# Steps of .ci/run: their seconds, and heavy ones that run only when what they depend on has changed.
# .ci/passed has a line for each heavy step: its name, a hash of its inputs when it last passed, the day.

PASSED=.ci/passed
EVERYTHING=${EVERYTHING:-}
step_name=
table=

# step NAME: what follows belongs to it.
step() {
    end_step
    step_name=$1
    step_start=$SECONDS
    printf '\n==> %s\n' "$1"
}

end_step() {
    if [ -n "$step_name" ]; then
        table+=$(printf '%6d s  %s' $((SECONDS - step_start)) "$step_name")$'\n'
    fi
    step_name=
}

# inputs_of COMMAND PATH...: a hash of the command, of its function's text, and of the committed files below the paths,
# each of which must have some: a list that a move has made wrong would let a step be skipped for ever.
inputs_of() {
    { echo "$1"; declare -f "${1%% *}"; git ls-files --stage --error-unmatch -- "${@:2}"; } | sha256sum | cut -c -16
}

# The hash of each heavy step's inputs when the run began; none while something of them is not committed.
declare -A inputs

# due NAME COMMAND PATH...: whether the heavy step must run. Without a commit of what was changed, it must.
due() {
    local hash known since
    hash=$(inputs_of "${@:2}") || exit 1
    inputs[$1]=$([ -n "$(git status --porcelain -- "${@:3}")" ] || echo "$hash")
    read -r known since < <(awk -v name="$1" '$1 == name { print $2, $3 }' "$PASSED" 2> /dev/null) || true
    if [ -z "$EVERYTHING" ] && [ -n "${inputs[$1]}" ] && [ "$known" = "${inputs[$1]}" ]; then
        table+=$(printf '%8s  %s: passed on %s, its inputs are the same' skipped "$1" "$since")$'\n'
        printf '\n==> %s: skipped, passed on %s and its inputs are the same (--all runs it)\n' "$1" "$since"
        return 1
    fi
}

# passed NAME...: write down that these heavy steps, which were due, passed with their inputs.
passed() {
    local name
    for name in "$@"; do
        [ -n "${inputs[$name]}" ] || continue
        {
            grep -v "^$name " "$PASSED" 2> /dev/null || true
            printf '%s %s %s\n' "$name" "${inputs[$name]}" "$(date -u +%F)"
        } | sort > "$PASSED.new"
        mv "$PASSED.new" "$PASSED"
    done
}

# heavy NAME COMMAND PATH...: a step of its own, run when it is due.
heavy() {
    end_step
    if due "$@"; then
        step "$1"
        eval "$2"
        passed "$1"
    fi
}

# not_run REASON: the step that began could not run here; the table says so, and nothing is recorded.
not_run() {
    step_name+=": DID NOT RUN, $1"
    echo "$step_name"
}

report() {
    end_step
    printf '\n%s%6d s  in all so far\n' "$table" "$SECONDS"
}
