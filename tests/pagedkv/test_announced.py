"""Two equal prompts at the same time: the second learns that the first is being computed."""

import pytest

from pagedkv import KVCacheManager, Media, Namespace

PROMPT = list(range(20))


def announced(**options: object) -> KVCacheManager:
    manager = KVCacheManager(32, 4, max_seqs=4)
    assert manager.open("first", PROMPT, announce=True, **options) is not None  # type: ignore[arg-type]
    return manager


def test_the_second_equal_prompt_learns_what_is_coming() -> None:
    """Nothing is cached yet, 16 of 20 tokens come; as they are committed they are cached instead."""
    manager = announced()
    for committed in (0, 4, 8, 16):
        manager.commit("first", PROMPT[manager.tables.num_committed("first") : committed])
        assert manager.lookup(PROMPT)[:3] == (20, committed, 16 - committed)
    manager.commit("first", PROMPT[16:])
    assert manager.lookup(PROMPT)[:3] == (20, 16, 0)
    assert manager.open("second", PROMPT) == (20, 16)


def test_only_what_was_announced_is_coming() -> None:
    """A prompt opened without ``announce`` is nobody's business."""
    manager = KVCacheManager(32, 4)
    manager.open("first", PROMPT)
    assert manager.lookup(PROMPT).num_coming_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "coming"),
    [(PROMPT[:9], 8), (PROMPT[:8], 4), ([*PROMPT[:5], 99, 99, 99], 4), ([99] * 9, 0), ([], 0)],
)
def test_what_is_coming_ends_where_the_prompts_part(prompt: list[int], coming: int) -> None:
    """Whole blocks only, and the last token is always computed."""
    assert announced().lookup(prompt).num_coming_tokens == coming


def test_other_namespaces_and_media_do_not_wait_for_each_other() -> None:
    """A namespace parts the prompts at once, other media at their block."""
    tenant = Namespace(salt="tenant")
    manager = announced(namespace=tenant, media=[Media(9, "cat")])
    assert manager.lookup(PROMPT).num_coming_tokens == 0
    assert manager.lookup(PROMPT, namespace=tenant).num_coming_tokens == 8
    assert manager.lookup(PROMPT, namespace=tenant, media=[Media(9, "dog")]).num_coming_tokens == 8
    assert manager.lookup(PROMPT, namespace=tenant, media=[Media(9, "cat")]).num_coming_tokens == 16


@pytest.mark.parametrize("how", ["close", "truncate", "truncate some"])
def test_nobody_waits_for_a_prompt_that_was_given_up(how: str) -> None:
    """Closed or cut, it will not be computed."""
    manager = announced()
    if how == "close":
        manager.close("first")
    else:
        manager.truncate("first", 8 if how == "truncate some" else 0)
    assert manager.lookup(PROMPT).num_coming_tokens == (8 if how == "truncate some" else 0)


def test_a_row_that_is_used_again_announces_nothing_old() -> None:
    """The next sequence in the same row of the table has a prompt of its own."""
    manager = announced()
    manager.close("first")
    manager.open("other", [7] * 12, announce=True)
    assert manager.lookup(PROMPT).num_coming_tokens == 0
    assert manager.lookup([7] * 12).num_coming_tokens == 8


def test_the_longest_announced_prompt_counts_and_the_caller_may_reuse_its_array() -> None:
    """Several are compared; what the caller does with its list later is no matter."""
    manager = announced()
    longer = [*PROMPT, 20, 21, 22, 23, 24]
    assert manager.open("second", longer, announce=True) is not None
    wanted = list(longer)
    longer[:] = [0] * 25
    assert manager.lookup(wanted).num_coming_tokens == 24
