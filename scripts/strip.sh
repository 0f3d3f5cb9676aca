#!/usr/bin/env bash
# Takes the debug information out of a program that was built, into PROGRAM.debug beside it, where debuggers and backtraces find it:
# it is four fifths of what the program weighs. Does nothing where that was done already.
set -eu
program=$1
[ "$program" -nt "$program.debug" ] || exit 0
objcopy --only-keep-debug "$program" "$program.debug"
strip --strip-debug "$program"
objcopy --remove-section=.gnu_debuglink --add-gnu-debuglink="$program.debug" "$program"
touch "$program.debug"
