"""Text in pieces: ids, rows and codes equal those of the whole text; a stream without text waits."""

import gc
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from callers import cut, made_up, say, seeded, voice_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_S, run_all, slow_case, until, until_spoken

from qwen_megakernel import EngineClosed, NoWordsError, RequestError, TextEndedError, TextTooLongError
from qwen_megakernel.checkpoint.load import DEMO_FOLDER, Checkpoint
from qwen_megakernel.engine.sequence import State
from qwen_megakernel.model.conditioning import Conditioning
from qwen_megakernel.model.prompt import PromptBuilder
from qwen_megakernel.model.prompt_pieces import PromptPieces
from qwen_megakernel.model.text import LONGEST_RUN, PieceEncoder, TextTokenizer
from qwen_megakernel.model.transformer import Embeddings
from qwen_megakernel.sampling_params import GREEDY

BITS = (
    *("Hello|world|don't|I'll|Straße|ä|e\u0301|n\u0303|a\u0300\u0323|\u1100\u1161\u11a8|각|हिन्दी".split("|")),
    *(" | |  |\n|\r\n|\t|\u3000|\u00a0|.|,|!|?|…|'|\"|(|-|_|#|@x".split("|")),
    *("1|23|4.5|你好|世界|，|。|こんにちは|か\u3099|😀|👨\u200d👩\u200d👧".split("|")),
    *("<|im_end|>", "\u200b"),
)
texts = st.lists(st.sampled_from(BITS), min_size=1, max_size=14).map("".join)


@pytest.fixture(scope="module", params=["demo", "tiny"])
def tokenizer(request, tiny):
    """The demo voice's reads what it lacks as ASCII."""
    folder = DEMO_FOLDER if request.param == "demo" else tiny("custom_voice")
    return TextTokenizer(folder, Checkpoint.open(folder).config.talker.text_vocab_size)


def ids_of(tokenizer, pieces) -> list[int]:
    encoder = PieceEncoder(tokenizer, "assistant\n")
    return [i for piece in pieces for i in encoder.push(piece)] + encoder.flush()


@settings(max_examples=300)
@given(text=texts, seed=st.integers(0, 2**32))
def test_ids_do_not_depend_on_how_the_text_was_cut(tokenizer, text, seed):
    assert ids_of(tokenizer, cut(text, random.Random(seed))) == ids_of(tokenizer, [text])


@settings(max_examples=300)
@given(text=texts, seed=st.integers(0, 2**32))
@example(text="HelloHelloä世界", seed=0)
def test_ids_equal_the_whole_texts_where_no_run_is_too_long(tokenizer, text, seed):
    encoder, longest = PieceEncoder(tokenizer, "assistant\n"), 0
    for character in tokenizer.folding(text) if tokenizer.folding else text:  # 世 is three letters there
        encoder.push(character)
        longest = max(longest, encoder.held)
    if longest < LONGEST_RUN:
        assert ids_of(tokenizer, cut(text, random.Random(seed))) == tokenizer.encode("assistant\n" + text)


@pytest.mark.parametrize(
    "text", ["Tomorrow we go home.", "Unfortunately, not.", "今天天气真好我们一起去公园散步吧", "Sixteen_letters_!"]
)
def test_the_first_word_may_be_as_long_as_any_other(tokenizer, text):
    """What stands in front of the text is encoded with it, and does not count."""
    if tokenizer.folding and len(max(tokenizer.folding(text).split(), key=len)) > LONGEST_RUN:
        pytest.skip("in ASCII it is longer")
    assert ids_of(tokenizer, list(text)) == tokenizer.encode("assistant\n" + text)


def test_a_piece_of_any_size_is_taken_in_time_that_grows_with_it(tokenizer):
    encoder, long = PieceEncoder(tokenizer), "word after word, " * 30_000
    ids = encoder.push(long) + encoder.flush()
    assert ids == tokenizer.encode(long)


def test_no_more_than_a_word_is_held_back(tokenizer):
    encoder = PieceEncoder(tokenizer)
    assert encoder.push("Hello") == [] and encoder.held == 5
    assert encoder.push(" ") == tokenizer.encode("Hello") and encoder.held == 1
    encoder = PieceEncoder(tokenizer)
    most = 0
    for character in "今天天气真好我们一起去公园散步然后回家吃饭看电影吧":
        encoder.push(character)
        most = max(most, encoder.held)
    assert most == LONGEST_RUN == 16, "as README says"


def test_a_long_run_is_cut_at_no_part_of_a_syllable():
    """NFC joins them, so the ids of the parts would be others."""
    tokenizer = SimpleNamespace(encode=lambda text: [text], folding=None)
    for parts in ("\u1100\u1161\u11a8", "e\u0301\u0323", "か\u3099"):
        encoder = PieceEncoder(tokenizer)
        run = "가" * (LONGEST_RUN - 1) + parts
        assert encoder.push(run) == [] and encoder.push("각") == [run]


@pytest.mark.parametrize("variant, frames", [("custom_voice", 0), ("base", 3), ("base", 12), ("base", 40)])
def test_rows_equal_the_whole_texts(tiny, variant, frames):
    checkpoint = Checkpoint.open(tiny(variant))
    tensors = checkpoint.talker(torch.device("cpu"), torch.float32)
    tokenizer = TextTokenizer(checkpoint.folder, checkpoint.config.talker.text_vocab_size)
    builder = PromptBuilder(checkpoint.config, tokenizer, Embeddings(checkpoint.config.talker, tensors))
    voice = made_up(checkpoint.config, frames) if frames else None
    speaker = builder.speakers[0] if builder.speakers else None
    conditioning = Conditioning(speaker, "english", "Slowly, please.", voice)
    for seed in range(20):
        rng = random.Random(seed)
        words = ["Hello", " there", ", how", " are", " you", "? ", "1", "2 ", "Straße", "\n"]
        text = "".join(rng.choice(words) for _ in range(rng.randint(1, 30)))
        if not text.strip():
            continue
        whole = builder.build(text, conditioning, non_streaming_mode=False)
        pieces, trailing = PromptPieces(builder, conditioning), []
        for piece in cut(text, rng):
            trailing.append(pieces.push(piece))
            if rng.random() < 0.1 and pieces.held == 0:
                trailing.append(pieces.flush())
        trailing.append(pieces.end())
        assert torch.equal(pieces.prompt.rows, whole.rows)
        assert torch.equal(torch.cat([pieces.prompt.trailing, *trailing]), whole.trailing), (seed, text)


def test_a_text_that_is_shorter_than_its_reference_begins_beside_the_references_first_frames(tiny):
    """Behind its end there is padding, so two texts differ in no later row."""
    checkpoint = Checkpoint.open(tiny("base"))
    tensors = checkpoint.talker(torch.device("cpu"), torch.float32)
    tokenizer = TextTokenizer(checkpoint.folder, checkpoint.config.talker.text_vocab_size)
    builder = PromptBuilder(checkpoint.config, tokenizer, Embeddings(checkpoint.config.talker, tensors))
    conditioning = Conditioning(voice=made_up(checkpoint.config, 60))
    one, two = (builder.build(text, conditioning, non_streaming_mode=False) for text in ("Yes.", "Yes. No."))
    assert len(one.rows) == len(two.rows) and len(one.trailing) == len(two.trailing) == 1
    (differs,) = (one.rows != two.rows).any(1).nonzero(as_tuple=True)
    ends = [one.text_at + len(tokenizer.encode(text)) for text in ("Yes.", "Yes. No.")]
    assert differs.tolist() == list(range(ends[0], ends[1] + 1))


@pytest.fixture
def engine(backend):
    with backend.load(max_streams=3, max_positions=300) as engine:
        yield engine


def same(ours, theirs) -> bool:
    """The same codes, and the same samples within what float arithmetic in another order makes of them."""
    return np.array_equal(ours.codes, theirs.codes) and np.abs(ours.samples - theirs.samples).max() <= 2e-5


def spoken(engine, utterance) -> int:
    """Frames so far, once it has nothing more to say."""
    until_spoken(engine, utterance)
    return engine.metrics()["frames"]


@pytest.mark.parametrize("seed", [0, *map(slow_case, range(1, 5))])
def test_codes_and_samples_equal_the_whole_texts(engine, seed):
    text = "Well, hello there: 3 of us are here! It's fine."
    whole = engine.generate(text, sampling=seeded(seed), non_streaming_mode=False, max_frames=60)
    utterance = engine.submit(sampling=seeded(seed), max_frames=60)
    for piece in cut(text, random.Random(seed)):
        utterance.push_text(piece)
        time.sleep(random.random() * 0.01)  # a slow writer
    utterance.end_text()
    assert same(utterance.result(), whole)


def test_a_pause_in_mid_sentence_is_no_end_and_changes_nothing(engine):
    """However long it is: a hundred frames of others go by."""
    text = "One two three four five six seven eight."
    whole = engine.generate(text, sampling=seeded(3), non_streaming_mode=False, max_frames=40)
    utterance = engine.submit(sampling=seeded(3), max_frames=40)
    utterance.push_text(text[:17])
    frames = spoken(engine, utterance)
    assert 0 < frames - 40 < 20 and not utterance.done, "it spoke what it had, no padding, and waits"
    assert engine.generate("Others go on.", max_frames=100, runaway_guard=False).frames == 100
    assert engine.metrics()["frames"] == frames + 100 and not utterance.done, "nothing is spoken in place of text"
    say(utterance, *cut(text[17:], random.Random(1)))
    assert same(utterance.result(timeout=PATIENCE_S), whole)


def test_speech_is_one_frame_ahead_of_the_text(engine):
    """A frame hears of the text row of the one before: the first sound does not wait for a second row."""
    utterance = engine.submit(sampling=GREEDY, max_frames=40, chunk_frames=1)
    for piece in cut("One two three four five six", random.Random(3)):
        utterance.push_text(piece)
        frames = spoken(engine, utterance)
        sequence = engine.snapshot().sequence(utterance.seed)
        assert frames == (0 if sequence.state is State.WAITING_TEXT else sequence.text_rows + 1)
    assert frames > 3
    utterance.cancel()


@pytest.mark.parametrize("frames", [slow_case(3), 30])
def test_a_clone_in_pieces_says_what_the_whole_text_would(backend, frames):
    """In-context, the prompt itself takes as many text rows as the reference has frames, its own text's among them."""
    text = "Well, hello there: 3 of us are here! It's fine, isn't it? One, two, three four five, six and seven."
    with backend.load(backend.folder("base"), max_streams=2) as engine:
        voice = voice_of(engine, frames)
        request = {"voice": voice, "sampling": seeded(frames), "max_frames": 60}
        whole = engine.generate(text, **request)
        utterance = engine.submit(**request)
        utterance.push_text("Well, hel")
        assert (spoken(engine, utterance) > 60) == (frames == 3), "it waits for the rows that its layout needs"
        say(utterance, *cut(text[9:], random.Random(frames)))
        assert same(utterance.result(timeout=PATIENCE_S), whole)


@pytest.mark.parametrize("text", ["Hel", "Hello there my "], ids=["before it spoke", "while it spoke"])
def test_a_dropped_utterance_gives_its_slot_back(engine, text):
    for _ in range(7):
        utterance = engine.submit(sampling=GREEDY)
        utterance.push_text(text)
        spoken(engine, utterance)
        del utterance
    gc.collect()
    until(lambda: engine.health()["streams"] == 0)
    assert engine.metrics()["cancelled"] == 7


@pytest.mark.parametrize("chunk_frames", [None, 50])
def test_a_stream_without_text_hands_out_all_it_has(engine, chunk_frames):
    heard = []
    utterance = engine.submit(on_chunk=lambda c: heard.append(len(c.codes)), chunk_frames=chunk_frames)
    utterance.push_text("Hello there my friend how are you today my dear ")
    utterance.flush()
    frames = spoken(engine, utterance)
    until(lambda: sum(heard) == frames > 8)  # its callback may still run
    utterance.cancel()


def test_flush_speaks_what_was_held_back(engine):
    utterance = engine.submit(sampling=GREEDY, max_frames=40)
    utterance.push_text("Hello")
    assert spoken(engine, utterance) == 0, "the word could go on"
    utterance.push_text(" you there")
    before = spoken(engine, utterance)
    utterance.flush()
    assert spoken(engine, utterance) > before and not utterance.done
    utterance.end_text()
    assert len(utterance.result(timeout=PATIENCE_S).codes) == 40
    for call in (utterance.flush, lambda: utterance.push_text("more")):
        with pytest.raises(TextEndedError):
            call()


def test_a_starved_stream_can_be_cancelled_and_closed(engine):
    utterances = [engine.submit(sampling=GREEDY) for _ in range(3)]
    for utterance in utterances:
        utterance.push_text("Hello there my ")
    spoken(engine, utterances[0])
    utterances[0].cancel()
    assert utterances[0].result(timeout=PATIENCE_S).finish_reason == "cancelled" and len(utterances[0].result().codes)
    run_all(engine.close)
    for utterance in utterances[1:]:
        assert utterance.result(timeout=PATIENCE_S).finish_reason == "cancelled"
    with pytest.raises((EngineClosed, RequestError)):
        utterances[1].push_text("more")


def test_text_that_outgrows_its_slot_fails_its_utterance_and_no_other(engine):
    other = engine.submit("Hello there.", sampling=GREEDY, max_frames=100)
    utterance = engine.submit(sampling=GREEDY)
    with pytest.raises(TextTooLongError, match="300"):
        for _ in range(1000):
            utterance.push_text("word after word ")
    with pytest.raises(TextTooLongError):
        utterance.result(timeout=PATIENCE_S)
    assert len(other.result(timeout=PATIENCE_S).codes) == 100 and engine.health()["streams"] == 0


def test_text_that_cannot_be_spoken_ends_by_its_error_although_the_engine_looks_meanwhile(engine, monkeypatch):
    """Not as one that somebody has cancelled."""
    admission, looked = engine._core.admission, []
    settle = admission.settle

    def late(sequence, reason="", error=None):
        if error and not looked:
            looked.append(True)
            admission.wake()  # as another utterance's text does
            engine.generate("Yes.", speaker="serena", max_frames=1)  # so turns have passed
        settle(sequence, reason, error)

    monkeypatch.setattr(admission, "settle", late)
    utterance = engine.submit(speaker="serena")
    with pytest.raises(NoWordsError):
        utterance.end_text()
    with pytest.raises(NoWordsError):
        utterance.result(PATIENCE_S)


def test_pieces_that_cannot_be_text_are_refused_and_nothing_is_taken(engine):
    utterance = engine.submit(sampling=GREEDY, max_frames=5)
    for bad in (None, 3, b"bytes", "\ud800"):
        with pytest.raises(RequestError):
            utterance.push_text(bad)
    assert len(say(utterance, "Hello there.").result(timeout=PATIENCE_S).codes) == 5
