"""A token of which there is nothing else to say is fed for less, and makes the same output."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvarto.core.sampling import SamplingParams
from kvarto.engine.messages import TokensOut
from kvarto.engine.outputs import RequestOutputs
from tests.engine.test_detokenizer import ByteVocabulary, stops, tokens


@settings(deadline=None)
@given(token_ids=tokens, stop=stops, keeps_stop=st.booleans(), min_tokens=st.integers(0, 3), skips=st.booleans())
def test_feeding_the_next_token_is_feeding_it(
    token_ids: list[int], stop: list[str], keeps_stop: bool, min_tokens: int, skips: bool
) -> None:
    sampling = SamplingParams(
        stop=tuple(stop), include_stop_str_in_output=keeps_stop, min_tokens=min_tokens, skip_special_tokens=skips
    )
    one, other = RequestOutputs(sampling, ByteVocabulary()), RequestOutputs(sampling, ByteVocabulary())
    first = TokensOut(request_id="r", choice=0, token_ids=(97,), num_cached_tokens=3)
    assert one.feed(first) == other.feed(first)
    for token_id in token_ids:
        assert one.feed(TokensOut(request_id="r", choice=0, token_ids=(token_id,))) == other.feed_next(token_id)
        assert one.resumed() == other.resumed()
    end = TokensOut(request_id="r", choice=0, token_ids=(97,), finish_reason="length")
    assert one.feed(end) == other.feed(end)
    assert one.is_finished
    assert other.is_finished
