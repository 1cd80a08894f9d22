"""Tensor-parallel servers of the real SGLang in one process: any number of ranks on either side."""

from __future__ import annotations

import pytest
from inprocess import MHA, MLA, OPTIONS, Pair, mha_pool, mla_pool, pages_of, spy, wait

KINDS = {"mha": (mha_pool, MHA), "mla": (mla_pool, MLA)}


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2), (4, 2)], ids=lambda r: f"{r[0]}to{r[1]}")
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_part(kind: str, ranks: tuple[int, int]) -> None:
    make, config = KINDS[kind]
    total, size, room = 600, 16, 77
    source, target = pages_of(total, 1, size), pages_of(total, 2, size)
    with Pair(make, config, size, ranks=ranks) as pair:
        senders, receivers = pair.request(room, target)
        pair.write_aux(room)
        for sender in senders:
            sender.init(len(source), aux_index=1)
            sender.describe(total, OPTIONS)
        for first, stop in ((0, 320), (320, total)):
            for sender in reversed(senders):  # the others are ready before the first rank, which decides
                sender.send(source[first // size : -(-stop // size)], num_kv_tokens=stop - first)
        ends = [*receivers, *senders]
        assert pair.settle(*ends) == ["Success"] * len(ends)
        assert pair.same(source, target, total)
        assert all(int(side.meta.bootstrap_room[5, 0]) == room for side in pair.decodes)
        for end in ends:
            end.clear()
        managers = [side.manager for side in (*pair.prefills, *pair.decodes)]
        wait(lambda: not any(m.side.active for m in managers), "the end of all transfers")


def test_the_ranks_send_by_one_decision_and_report_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    total, size, room = 600, 16, 78
    source, target = pages_of(total, 1, size), pages_of(total, 2, size)
    with Pair(mha_pool, MHA, size, ranks=(2, 1)) as pair:
        controller = pair.prefill.manager.setup.deployment.controller
        chosen, seen = spy(monkeypatch, controller, "choose"), spy(monkeypatch, controller, "observe")
        other = pair.prefills[1].manager.setup.deployment.controller
        others = spy(monkeypatch, other, "choose")
        senders, (receiver,) = pair.request(room, target)
        pair.write_aux(room)
        for sender in senders:
            sender.init(len(source), aux_index=1)
            sender.send(source, num_kv_tokens=total)
        assert pair.settle(receiver, *senders) == ["Success"] * 3
        wait(lambda: seen, "the report")
        assert (len(chosen), len(seen), len(others)) == (1, 1, 0)
        decision, outcome = seen[0]
        assert decision.profile == outcome.profile
        assert outcome.raw_bytes >= total * pair.prefill.manager.setup.model.token_bytes()
