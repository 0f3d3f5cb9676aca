#!/usr/bin/env bash
# Moves the debug information of a built program into PROGRAM.debug in the same folder, where debuggers and backtraces find it:
# it is four fifths of the program's size. Does nothing if that was done already.
set -eu
program=$1
[ "$program" -nt "$program.debug" ] || exit 0
objcopy --only-keep-debug "$program" "$program.debug"
strip "$program"
objcopy --remove-section=.gnu_debuglink --add-gnu-debuglink="$program.debug" "$program"
touch "$program.debug"
