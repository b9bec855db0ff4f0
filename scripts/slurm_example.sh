#!/bin/bash
# Multi-node training under Slurm: one launcher per machine, which starts one process per GPU.
#
#   sbatch scripts/slurm_example.sh oblique_topology/train.py \
#       --config oblique_topology/configs/table2_clip.yaml --scale paper data.root=/data/pairs
#
# Submit from the root of the repository. Adapt the lines below to the cluster (partition, account, time).
# Not run: needs a Slurm cluster with GPUs. Checked: bash -n, and with stand-ins for srun and scontrol that start two
# "machines" of one CPU process each.
#SBATCH --job-name=contrastive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=outputs/slurm-%j.log
#SBATCH --signal=TERM@120
# Two minutes before the end every training process saves a checkpoint after its step. The launcher gives them 30 seconds
# and then ends with status 1.
# Slurm does not make the folder of --output: mkdir -p outputs before sbatch.
# With --resume auto a job that ran into its time limit resumes when it is submitted again; name an --output-dir,
# because the default folder changes with the config; after a change of the code the run there is set aside.

set -euo pipefail

if [ "$#" -eq 0 ]; then
    echo "usage: sbatch scripts/slurm_example.sh <paper>/train.py [options of that script]" >&2
    exit 2
fi

cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

GPUS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
NUM_PROCESSES=$((SLURM_NNODES * GPUS_PER_NODE))
MAIN_PROCESS_IP=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MAIN_PROCESS_PORT=$((29500 + SLURM_JOB_ID % 1000)) # two jobs on one machine do not meet

echo "job $SLURM_JOB_ID: $NUM_PROCESSES processes on $SLURM_NNODES machines, the first is $MAIN_PROCESS_IP"

export SLURM_NNODES NUM_PROCESSES MAIN_PROCESS_IP MAIN_PROCESS_PORT

# SLURM_PROCID differs per machine, so it must be expanded inside srun, not here
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file scripts/accelerate/multi_node.yaml \
        --num_machines "$SLURM_NNODES" --num_processes "$NUM_PROCESSES" --machine_rank "$SLURM_PROCID" \
        --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT" \
        "$@"' launcher "$@"
