#!/bin/bash
#SBATCH --job-name=hpcjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --output=%x-%j.out
#SBATCH --requeue
#SBATCH --open-mode=append
# One minute before the end of the time, a signal: the run saves and ends with 75.
#SBATCH --signal=USR1@60

source .venv/bin/activate
CONFIG="jorge/digits:jorge"
OVERRIDES="train.batch_size=128"

# A job that Slurm has put back goes on with its run, wherever it starts again.
srun hpcjax run $CONFIG $OVERRIDES --distributed --quiet --resume last
STATUS=$?
if [ $STATUS -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $STATUS
