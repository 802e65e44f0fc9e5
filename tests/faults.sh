#!/bin/sh
# Shows that the tests would see a mistake: runs the suite for each fault that is planted in src,
# and names the tests that fail. Two must. `--quick` stops at the second, and leaves out the tests
# that take long.
set -eu
cd "$(dirname "$0")/.."

quick=
case "${1-}" in
    --quick) quick=yes ;;
    "") ;;
    *) echo "usage: $0 [--quick]" >&2 && exit 2 ;;
esac

# One build for all faults, in a folder of its own: the flag goes to every dependency.
export RUSTFLAGS="${RUSTFLAGS-} --cfg toolscope_faults"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/faults"
export CARGO_PROFILE_DEV_DEBUG="${CARGO_PROFILE_DEV_DEBUG:-0}"
export CARGO_TERM_COLOR=never
export RUST_BACKTRACE=0

# What takes seconds even if nothing is wrong.
slow='cut::p2_|stress::p1_|stress::p4_every_'

# Processes have no faults yet.
tests='--test allocations --test exit --test it'

log=$(mktemp)
trap 'rm -f "$log"' EXIT

if cargo nextest --version >/dev/null 2>&1; then
    with_nextest=yes
    cargo nextest run --cargo-quiet --lib $tests --no-run
else
    with_nextest=
    cargo test --quiet --lib $tests --no-run
fi

# Runs the suite with a fault, into the log.
suite() {
    export TOOLSCOPE_FAULT="$1"
    if [ "$with_nextest" ]; then
        set -- --no-fail-fast
        [ -z "$quick" ] || set -- --max-fail 2:immediate -E "not test(/^($slow)/)"
        status=0
        cargo nextest run --cargo-quiet --profile faults --lib $tests "$@" >"$log" 2>&1 || status=$?
        # 100 is nextest's word for tests that failed.
        [ $status -eq 0 ] || [ $status -eq 100 ] || { cat "$log" >&2 && exit 1; }
    else
        set --
        [ -z "$quick" ] || set -- $(echo "$slow" | sed -E 's/(^|\|)/ --skip /g')
        # A test that hangs is named after a minute, and has to be ended.
        timeout 90 cargo test --lib $tests --no-fail-fast -- "$@" >"$log" 2>&1 || true
    fi
}

# The tests that failed, or hung, by name.
failed() {
    sed -nE -e 's/^ +(TRY [0-9]+ )?(FAIL|TIMEOUT|TMT|ABORT|SIG[A-Z]+) +\[[^]]*\] +(\([^)]*\) +)?//p' \
        -e 's/^test (.*) (\.\.\. FAILED|has been running for over .*)$/\1/p' "$log" | sort -u
}

suite none
if [ -n "$(failed)" ]; then
    echo "no fault: these fail all the same"
    failed | sed 's/^/    /'
    exit 1
fi
echo "no fault: all tests pass"

total=0
seen=0
for fault in $(grep -rhoE '\bfault\("[a-z-]+"\)' src | cut -d'"' -f2 | sort -u); do
    suite "$fault"
    count=$(failed | wc -l)
    echo "$fault: $count failed"
    failed | sed 's/^/    /'
    total=$((total + 1))
    [ "$count" -lt 2 ] || seen=$((seen + 1))
done
echo "faults: $seen of $total seen"
[ "$seen" -eq "$total" ]
