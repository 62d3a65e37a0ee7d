#!/bin/sh
# run.sh TARGET SECONDS: makes a small corpus of whole and of broken files beside TARGET, then fuzzes.
set -eu
target=$1
seconds=$2
corpus=$target.corpus
mkdir -p "$corpus"

# seed NAME HEADER DATA: a file with a header length below 256.
seed() {
  { printf "\\$(printf '%03o' ${#2})\\0\\0\\0\\0\\0\\0\\0"; printf '%s%s' "$2" "$3"; } > "$corpus/$1"
}
seed one '{"t":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}' abcd
seed two '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"F4","shape":[4],"data_offsets":[2,4]}}' abcd
seed metadata '{"__metadata__":{"k":"v"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}' abcd
seed overlap '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}' abcd
seed nested '{"a":[[[[[[[[{}]]]]]]]]}' ''
seed overflow '{"t":{"dtype":"F64","shape":[9223372036854775807,2],"data_offsets":[0,0]}}' ''

cat > "$target.dict" <<'DICT'
"\"dtype\""
"\"shape\""
"\"data_offsets\""
"\"__metadata__\""
"\"BF16\""
"\"F8_E4M3\""
"18446744073709551615"
"9223372036854775807"
DICT

# libFuzzer's lines are many and only wanted where it found something.
if ! "$target" -dict="$target.dict" -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=2048 "$corpus" >"$target.log" 2>&1
then
  tail -n 60 "$target.log"
  exit 1
fi
grep '^Done' "$target.log"
