"""Who may be served, and what a refusal says."""

from __future__ import annotations

import logging

import msgspec
import pytest
import small_models

from kvserve_core.errors import TransportError
from kvserve_core.peer import PeerInfo
from kvserve_core.spec import KVSpec, whole
from kvserve_sglang.messages import Register
from kvserve_sglang.peers import Peers

HOLDS = {"model": "tiny", "KV cache dtype": "torch.bfloat16", "metadata buffers": "4 8"}


def register(kv: KVSpec, **holds: str) -> Register:
    peer = PeerInfo((1, 1), {}, "cpu", kv.fingerprint, whole(kv))
    return Register("127.0.0.1", 1, "session", peer, HOLDS | holds)


@pytest.fixture
def peers() -> Peers:
    return Peers(small_models.model().fingerprint, HOLDS)


def test_an_equal_cache_is_served(peers: Peers) -> None:
    mine = register(small_models.model())
    peers.add(mine)
    assert peers.of("session") is mine
    assert peers.refusal("session") is None


def test_a_refusal_says_what_differs_and_is_logged(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        peers.add(register(small_models.model("another"), model="another", **{"metadata buffers": "4 16"}))
    refusal = peers.refusal("session")
    assert refusal is not None
    assert "model is 'tiny' here and 'another' there" in refusal
    assert "metadata buffers is '4 8' here and '4 16' there" in refusal
    assert "dtype" not in refusal
    assert refusal in caplog.text


def test_a_difference_that_no_name_shows_is_refused_too(peers: Peers) -> None:
    peers.add(register(small_models.windowed(6)))
    assert "laid out differently" in str(peers.refusal("session"))


def test_who_lacks_a_name_differs_in_it(peers: Peers) -> None:
    theirs = register(small_models.model("another"))
    theirs.holds.pop("metadata buffers")
    peers.add(theirs)
    assert "metadata buffers is '4 8' here and None there" in str(peers.refusal("session"))


def test_who_comes_back_with_an_equal_cache_is_served(peers: Peers) -> None:
    peers.add(register(small_models.model("another")))
    peers.add(register(small_models.model()))
    assert peers.refusal("session") is None


def test_of_too_many_the_oldest_are_forgotten(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserve_sglang.peers.KEPT", 2)
    for session in ("a", "b", "a", "c"):
        peers.add(msgspec.structs.replace(register(small_models.model()), session=session))
    assert [peers.refusal(session) is None for session in "abc"] == [True, False, True]


def test_nobody_is_served_unintroduced(peers: Peers) -> None:
    assert "before it registered" in str(peers.refusal("stranger"))
    with pytest.raises(TransportError, match="'stranger'"):
        peers.of("stranger")
