#!/bin/sh
# Runs every example and compares what it prints with examples/expected, times and sizes masked. The counts of the
# quickstart are compared with find and wc, over the crate's own src and over a folder that is made to be difficult.
set -eu
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

fail() {
    echo "examples: $1" >&2
    failed=1
}

# What `find` and `wc` say of a folder, in the words of the quickstart. For it a word is what stands between ASCII white
# space; older versions of `wc` pass over words without a printable character, and in the C locale those that are not
# ASCII, hence the locale here.
counts() {
    find "$1" -type f -exec cat {} + >"$work/all"
    files=$(find "$1" -type f -exec printf . \; | wc -c)
    set -- $(LC_ALL=C.UTF-8 wc <"$work/all")
    echo "folder: $files files, $1 lines, $2 words, $3 bytes"
}

same_counts() {
    cargo run --quiet --example quickstart -- "$1" 2>/dev/null | grep '^folder: ' >"$work/counted"
    counts "$1" | diff - "$work/counted" || fail "quickstart does not count \`$1\` as find and wc do"
}

mask() {
    sed -E -e 's/^( *)[0-9]+ /\1PID /; s/tree of [0-9]+/tree of PID/' -e 's/ +[0-9]+\.[0-9]{3} +[0-9]+$/ MS BYTES/' -e '/^folder: /s/[0-9]+/N/g'
}

cargo build --quiet --examples
total=0
ok=0
for expected in examples/expected/*.txt; do
    name=$(basename "$expected" .txt)
    total=$((total + 1))
    before=$failed
    failed=0
    cargo run --quiet --example "$name" >"$work/out" 2>"$work/err" || fail "$name ended with an error"
    mask <"$work/out" | diff "$expected" - || fail "$name prints something else"
    if [ "$name" = quickstart ]; then
        mkdir -p "$work/folder/deep/.hidden" "$work/folder/empty"
        printf 'one two\n\n\tthree\013four' >"$work/folder/plain"
        printf 'no\377\376 utf-8 \342\224\200 here\n' >"$work/folder/deep/.hidden/bytes"
        : >"$work/folder/deep/empty file"
        ln -s "$PWD/src" "$work/folder/link"
        same_counts src
        same_counts "$work/folder"
        last=$(tail -n 1 "$work/out")
        [ "$last" = 'ledger: activated 5, deactivated 5, open 0, lost 0' ] || fail "the ledger says: $last"
        cargo run --quiet --example quickstart -- --json >"$work/json" 2>/dev/null
        grep -q '"lost": 0' "$work/json" || fail 'quickstart --json gives no ledger'
    fi
    [ "$failed" -eq 0 ] && ok=$((ok + 1))
    failed=$((failed | before))
done
echo "examples: $ok of $total ok"
[ "$ok" -eq 5 ] && [ "$failed" -eq 0 ]
