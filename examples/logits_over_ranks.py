"""The logits of a vocabulary in shards, gathered over NVLink. Run: torchrun --nproc-per-node 2 logits_over_ranks.py"""

import os
import sys

try:
    import torch
    import twostep.torch
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
if "RANK" not in os.environ or torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    print("skipped: start it with torchrun, with a GPU for each rank")
    sys.exit(77)

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("gloo")

shard = torch.full((8, 20480), rank, dtype=torch.bfloat16, device="cuda")
gather = twostep.torch.LogitsGather(torch.distributed.group.WORLD, width=20480)  # by all ranks together
logits = gather.gather_logits(shard)  # [8, ranks * 20480]; None: not served, on all ranks
torch.cuda.synchronize()
gather.mailbox.check()  # at each step's synchronisation: raises where a rank was lost

assert logits[0, ::20480].tolist() == list(range(ranks))
gather.close()
torch.distributed.destroy_process_group()
