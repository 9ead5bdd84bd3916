#!/bin/sh
# keep_log.sh FOLDER COMPILER ARGUMENTS…: run the compiler and keep what it says in
# FOLDER/<object>.log, where tests/test_build.py reads registers, spills and remarks. Shown are
# remarks, warnings and errors; of ptxas' resource counts, one line for each main kernel.
folder=$1
shift
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
mkdir -p "$folder"
log=$folder/$(basename "$object" .o).log
"$@" >"$log.part" 2>&1
status=$?
counts='^ptxas info +: ([0-9]+ bytes|Compil|Function properties|Used)|bytes stack frame'
grep -vE "$counts" "$log.part"
[ "$status" = 0 ] || exit "$status"
mv "$log.part" "$log"
awk -v name="$(basename "$object" .o)" '
  /Compiling entry function/ { main = /attention_backward/ }
  main && /stack frame/ { sub(/^ */, ""); memory = $0 }
  main && /Used/ { print name ": main kernel: " $5 " registers, " memory }' "$log"
