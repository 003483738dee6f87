"""The entry that launchers start, one process a rank; works from an installed package. Each gives the same run:

deepspeed --num_gpus 8 --module hybrid5d.worker --config RUN.yaml
accelerate launch --use_deepspeed --num_processes 8 -m hybrid5d.worker --config RUN.yaml
torchrun --nproc_per_node 8 -m hybrid5d.worker --config RUN.yaml

`key=value` words at the end win over the YAML: actor.optim.lr=1e-3. One process needs no launcher.
"""

import sys

from hybrid5d.launch.worker import main

if __name__ == "__main__":
    sys.exit(main())
