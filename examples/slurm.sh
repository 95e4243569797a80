#!/bin/bash
# A run under Slurm, on one node or several: sbatch --nodes 2 examples/slurm.sh --config cppo_math.yaml --set out=runs/math
# Submit it from the repository, on a file system that all nodes share. VENV is the virtual environment (.venv-gpu).
#SBATCH --job-name=winnow
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive               # else a task has one core,
#SBATCH --mem=0                   # and the memory of one; 0: all that the node has
#SBATCH --time=24:00:00
#SBATCH --requeue                 # after a node has failed, or for another job
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900       # to this script, 15 minutes before the time is over
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source "${VENV:-.venv-gpu}/bin/activate"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600   # seconds for the step under way, and its save

over=no
trap 'over=yes; scancel --signal=TERM "$SLURM_JOB_ID" || true' USR1  # the run saves, and ends
srun --cpus-per-task "$SLURM_CPUS_ON_NODE" torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" --rdzv_backend c10d \
    --rdzv_id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv_endpoint "$head:${PORT:-29500}" \
    train.py --resume auto "$@" &
status=0
wait $! || status=$?              # the trap ends this wait
if [ "$over" = yes ]; then
  wait $! || true
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
