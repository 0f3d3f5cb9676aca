#!/bin/sh
# Installs the external programs of 'make sweeps': Debian's slurmctld, slurmd and slurm-client, and munge, which
# authenticates them. The tests start them as processes of their own, with their own files.
#
# For Debian 12 (and relatives), as root or with sudo if a package is missing.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)

. "$root/scripts/lib/packages.sh"

# Program, package and reason, one per line.
missing=''
while IFS='|' read -r there package reason; do
    [ -e "$there" ] && continue
    say "needs $package: $reason"
    missing="$missing $package"
done <<END
/usr/sbin/munged|munge|by which Slurm's programs know each other
/usr/sbin/slurmctld|slurmctld|hands out the parts of a sweep
/usr/sbin/slurmd|slurmd|runs them
/usr/bin/sbatch|slurm-client|submits the script
END
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # one word per package is meant
    apt_install $missing || die "apt-get could not install$missing (see above)"
fi
