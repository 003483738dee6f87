"""The entry that launchers start, one process a rank. Each of these gives the same run:

deepspeed --num_gpus 8 examples/train.py --config examples/quickstart.yaml
accelerate launch --use_deepspeed --num_processes 8 examples/train.py --config examples/quickstart.yaml
torchrun --nproc_per_node 8 examples/train.py --config examples/quickstart.yaml

`key=value` words at the end win over the YAML: actor.optim.lr=1e-3. One process needs no launcher.
"""

import sys

from hybrid5d.worker import main

if __name__ == "__main__":
    sys.exit(main())
