#!/bin/bash
#SBATCH --job-name=onnxplace
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=onnxplace-%j.log
#
#   sbatch examples/hosts/slurm.sh model.onnx
#
# This script runs once, on the first node. onnxplace starts processes on the others by ssh, which most sites allow within an
# allocation. Where yours does not: REMOTE_SHELL=examples/hosts/srun_shell.sh. Model, bundle and this Python environment
# (pip install 'onnxplace[cpu,mpi]') have to be on a file system that all nodes share.
set -euo pipefail

model=$1
bundle=${model%.onnx}.bundle
shell=${REMOTE_SHELL:-ssh}
examples=${EXAMPLES:-examples/hosts}

onnxplace hosts --hosts "$SLURM_JOB_NODELIST" --remote-shell "$shell" -o cluster.toml
onnxplace compile "$model" --target cluster.toml -o "$bundle" --force
onnxplace verify "$bundle" --runtime mpi --remote-shell "$shell" --start-timeout 120
onnxplace bench "$bundle" --runtime mpi --remote-shell "$shell" --start-timeout 120 --in-flight 8
python "$examples/answer_requests.py" "$bundle" --remote-shell "$shell"
