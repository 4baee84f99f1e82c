#!/bin/sh
# A remote shell for onnxplace within a Slurm allocation, where ssh between nodes is not allowed:
#
#   onnxplace hosts --hosts "$SLURM_JOB_NODELIST" --remote-shell examples/hosts/srun_shell.sh
#
# It is called as PROGRAM [OPTIONS] HOST COMMAND.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" sh -c "$*"
