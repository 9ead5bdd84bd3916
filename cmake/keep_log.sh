#!/bin/sh
# keep_log.sh FOLDER COMPILER ARGUMENTS…: run the compiler, show what it says, and keep it in
# FOLDER/<object>.log. tests/test_build.py reads registers, spills and warnings from there.
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
cat "$log.part"
[ "$status" = 0 ] && mv "$log.part" "$log"
exit "$status"
