"""One rank exchanges nothing; several gather and add in rank order."""

import torch
import torch.distributed as dist
from ranks import Ranks

from moetail import reference
from moetail.models.parallel import TensorParallel
from moetail.testing import assert_same_bits

CPU = torch.device("cpu")


def mine(rank):
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16) * 2.0 ** (4 * rank)


def test_alone():
    tp, x = TensorParallel.of(None, 8, 16, CPU), mine(0)
    assert (tp.rank, tp.size) == (0, 1)
    assert tp.all_reduce(x) is x and tp.gather_columns(x) is x


def of_one(group):
    tp, x = TensorParallel.of(dist.new_group([group.rank()], use_local_synchronization=True), 8, 16, CPU), mine(0)
    assert tp.size == 1 and tp.all_reduce(x) is x


def exchange(group):
    tp = TensorParallel.of(group, 8, 16, CPU)
    assert (tp.rank, tp.size) == (group.rank(), 3)
    return tp.all_reduce(mine(tp.rank)), tp.gather_columns(mine(tp.rank)), tp.gather_columns(mine(tp.rank).T)


def test_three_ranks():
    everyone = [mine(rank) for rank in range(3)]
    with Ranks(3) as ranks:
        ranks.run(of_one)
        for total, wide, transposed in ranks.run(exchange):
            assert_same_bits(total, reference.all_reduce(everyone))
            assert_same_bits(wide, torch.cat(everyone, 1))
            assert_same_bits(transposed, torch.cat([x.T for x in everyone], 1))
