"""What one update of the main job costs at the batch server: CPU seconds of server and client together.

    python tests/benchmarks/batch_server_update.py

96 groups, about 1,075 rows of some 30 ids with messages and overrides, posted, leased, read and acked.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from atropos_gym.batch_server.client import AsyncBatchClient, BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.wire import ScoredDataGroup

GROUPS, ROWS, UPDATES = 96, 11, 10


def make_group(rng: random.Random) -> ScoredDataGroup:
    """A group like those of the main job."""
    tokens = [[rng.randrange(264) for _ in range(rng.randint(26, 34))] for _ in range(ROWS)]
    masks = [[-100] * (len(ids) - 6) + ids[-6:] for ids in tokens]
    logprobs = [[1.0] * (len(ids) - 6) + [-rng.random() for _ in range(6)] for ids in tokens]
    talk = [
        {"role": "system", "content": "Blackjack. Answer with one word: hit or stick."},
        {"role": "user", "content": "You have 12, the dealer shows 4."},
        {"role": "assistant", "content": "hit"},
    ]
    override = {"turn_rewards": [1.0], "turn_versions": [3], "cut": False, "truncated": False}
    return ScoredDataGroup(
        tokens=tokens,
        masks=masks,
        scores=[rng.choice([-1.0, 1.0]) for _ in range(ROWS)],
        advantages=[[rng.random()] * len(ids) for ids in tokens],
        messages=[talk] * ROWS,
        generation_params={"temperature": 1.0},
        inference_logprobs=logprobs,
        overrides=[
            {**override, "episode": row % 8, "turns": [[len(ids) - 6, len(ids)]], "end_reason": "terminated"}
            for row, ids in enumerate(tokens)
        ],
        group_overrides={"policy_version": 3, "group_size": ROWS, "segments": True},
    )


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(url: str, pid: int, one_by_one: bool) -> None:
    """Runs some updates and prints their mean cost."""
    rng = random.Random(0)
    groups = [make_group(rng) for _ in range(GROUPS)]
    learner = BatchClient(url)
    async with AsyncBatchClient(url) as service:
        learner.register(groups_per_update=GROUPS, max_policy_lag=0, takeover=True)
        before, server_before, wall = time.process_time(), cpu_of(pid), time.perf_counter()
        for _ in range(UPDATES):
            if one_by_one:
                await asyncio.gather(*(service.post_group(group) for group in groups))
            else:
                await service.post_groups(groups)
            batch = learner.batch(wait_seconds=10, lease_seconds=60)
            assert batch is not None and batch.sequences == GROUPS * ROWS
            learner.ack(str(batch.batch_id))
        wall = (time.perf_counter() - wall) / UPDATES
        client = (time.process_time() - before) / UPDATES
        server = (cpu_of(pid) - server_before) / UPDATES
    learner.close()
    size = sum(len(group.to_json()) for group in groups)
    how = "one by one" if one_by_one else "in one list"
    print(f"{size / 1e6:.2f} MB {how}: client {client:.3f} s, server {server:.3f} s, wall {wall:.3f} s")


if __name__ == "__main__":
    with ServerProcess() as server:
        for one_by_one in (False, True):
            asyncio.run(measure(server.url, server.pid, one_by_one))
