"""Continuous batching: every answer as if the request were alone, and requests that end early."""

import random
import time

import pytest
import torch

from sympow.cli.served_model import room_shown
from sympow.data import ByteTokenizer
from sympow.models import LanguageModel, MixerConfig, ModelConfig, generate
from sympow.models.slots import CacheRoom, Slots, slot_bytes
from sympow.ops.memory import Memory
from sympow.serving import Engine, EngineClosedError, PrefixCache, QueueFullError, Sampling
from tests.draws import make_every_token_matter
from tests.serving.conftest import Client, ask, tokens

TOKENIZER = ByteTokenizer()


@pytest.fixture(autouse=True, params=[False, True], ids=["", "ahead"])
def ahead(request, monkeypatch):
    """As on a CPU, and as on a GPU, which begins a step before the answers have the tokens of the last one."""
    monkeypatch.setattr("sympow.serving.decoding.runs_ahead", lambda device: request.param)
    return request.param


def alone(model, prompt, new=12, **options) -> list[int]:
    return generate(model, prompt[None], new, **({"temperature": 0} | options)).tokens[0].tolist()


def test_requests_of_all_lengths_are_answered_as_alone(engine, model):
    """More than there are slots, shorter and longer than a chunk, coming while others decode."""
    prompts = [tokens(length, length) for length in (1, 70, 3, 16, 17, 120, 33, 5, 64, 2)]
    first = ask(engine, *(Client(prompt, 5 + 3 * i) for i, prompt in enumerate(prompts)))
    for i, (prompt, (drawn, text, last)) in enumerate(zip(prompts, first, strict=True)):
        assert drawn == alone(model, prompt, 5 + 3 * i)
        assert text == TOKENIZER.decode(drawn) and last.finish == "length"
        assert (last.usage.prompt_tokens, last.usage.new_tokens) == (len(prompt), 5 + 3 * i)
    assert engine.load == (0, 0, 0)


def test_a_seed_gives_the_tokens_of_generate(engine, model):
    options = [{"temperature": 0.9, "seed": i, "top_k": 50 + i, "top_p": 0.9} for i in range(4)]
    results = ask(engine, *(Client(tokens(9, i), sampling=Sampling(**each)) for i, each in enumerate(options)))
    for i, (drawn, _, _) in enumerate(results):
        assert drawn == alone(model, tokens(9, i), **options[i])


def test_short_prompts_that_wait_together_are_read_together(engine, model, ahead, monkeypatch):
    """On a GPU. The longer ones end their prompts in steps, which draw nothing from their random numbers."""
    lengths, step, shapes = (18, 16, 31, 25), LanguageModel.step, []

    def noted(self, x, state):
        shapes.append(tuple(x.shape))
        return step(self, x, state)

    monkeypatch.setattr(LanguageModel, "step", noted)
    clients = [Client(tokens(n, n), sampling=Sampling(0.9, seed=n), logprobs=1) for n in lengths]
    results = ask(engine, *clients)
    read = {shape for shape in shapes if shape[1] > 1}
    assert read == ({(4, 16)} if ahead else {(1, n) for n in (2, 9, 15, 16)})
    for n, (drawn, text, last) in zip(lengths, results, strict=True):
        assert drawn == alone(model, tokens(n, n), temperature=0.9, seed=n) and text == TOKENIZER.decode(drawn)
        assert (last.usage.prompt_tokens, last.usage.new_tokens, last.usage.cached_tokens) == (n, 12, 0)


def test_requests_at_a_time_share_their_steps(engine, monkeypatch):
    """Four requests take about as many steps as one of them."""
    step, counts = Slots.step, []

    def counted(self, x):
        counts.append(len(x))
        return step(self, x)

    monkeypatch.setattr(Slots, "step", counted)
    ask(engine, *(Client(tokens(16 + i, i), 40) for i in range(4)))
    assert 39 <= len(counts) <= 50 and counts.count(4) >= 30


def test_many_requests_take_the_steps_of_one(ahead):
    """64 prompts that come at once decode as one batch: the engine takes hardly more steps than for one prompt."""
    model = LanguageModel(ModelConfig(256, 16, 1, 1), seed=0).eval()
    engine = Engine(model, TOKENIZER, slots=64)
    engine.start()
    results = ask(engine, *(Client(tokens(17 + i % 16, i), 100) for i in range(64)))
    engine.close()
    assert {last.usage.new_tokens for _, _, last in results} == {100}
    steps, rows, calls = engine.work.steps, engine.work.rows, engine.work.pieces
    assert steps <= 120 + 64 * (not ahead)  # elsewhere than on a GPU prompts are read one by one, between steps
    assert rows >= 64 * 99 and (calls <= 8 if ahead else calls == 64)


def test_on_a_gpu_a_prompt_shorter_than_a_piece_is_read_by_steps(engine, model, ahead):
    prompts = [tokens(length, length) for length in (1, 2, 15, 9)]
    results = ask(engine, *(Client(prompt, sampling=Sampling(0.8, seed=3)) for prompt in prompts))
    for prompt, (drawn, _, last) in zip(prompts, results, strict=True):
        assert drawn == alone(model, prompt, temperature=0.8, seed=3)
        assert (last.usage.prompt_tokens, last.usage.new_tokens) == (len(prompt), 12)
    assert (engine.work.pieces == 0) == ahead


def test_without_streaming_there_is_one_piece(engine, model):
    (drawn, _, last), *_ = ask(engine, Client(tokens(20), stream=False))
    assert drawn == alone(model, tokens(20)) and last.tokens == 12 == len(last.logprobs)


def test_logprobs_are_those_of_the_model(engine, model):
    client = Client(tokens(6), 1, logprobs=3)
    engine.submit([client.request])
    piece = client.pieces.get(timeout=60)
    logits, _ = model.step(tokens(6)[None], model.init_state(1))
    best = logits[0].log_softmax(-1).topk(3)
    (shown,) = piece.logprobs
    assert [token for token, _ in shown.top] == best.indices.tolist()
    assert [shown.logprob, *(value for _, value in shown.top[1:])] == pytest.approx(best.values.tolist())


def test_a_stop_sequence_ends_the_answer_and_is_not_part_of_it(engine, model):
    whole = TOKENIZER.decode(alone(model, tokens(11), 30))
    stop = whole[9:12]
    (_, text, last), *_ = ask(engine, Client(tokens(11), 30, stop=("never this", stop)))
    assert text == whole[: whole.index(stop)] and last.finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_the_tokens_of_the_text(engine, model, stream):
    """Also in every piece of a stream, which cannot take back what it has sent."""
    tokens_alone = alone(model, tokens(11), 30)
    whole = TOKENIZER.decode(tokens_alone)
    for stop in ((whole[20:23],), (whole[20:23], "\x00never"), (whole[0],), ("never",)):
        client = Client(tokens(11), 30, stop=stop, stream=stream, logprobs=1)
        engine.submit([client.request])
        text, drawn, finish = "", [], None
        while finish is None:
            piece = client.pieces.get(timeout=60)
            text, drawn, finish = text + piece.text, drawn + [each.token for each in piece.logprobs], piece.finish
            assert len(TOKENIZER.decode(drawn)) >= len(text)
            if drawn:
                assert len(TOKENIZER.decode(drawn[:-1])) <= len(text)
        assert TOKENIZER.decode(drawn) == text and drawn == tokens_alone[: len(drawn)]
        assert finish == ("length" if stop == ("never",) else "stop")


def test_an_end_token_ends_the_answer(model):
    expected = alone(model, tokens(11), 30)
    end = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    engine = Engine(model, TOKENIZER, ends=[end])
    engine.start()
    (drawn, _, last), *_ = ask(engine, Client(tokens(11), 30))
    engine.close()
    assert drawn == expected[: expected.index(end)] and last.finish == "stop"
    assert last.usage.new_tokens == len(drawn) + 1


def test_narrow_states_answer_alike(model):
    """The slots take less memory, and prompts that are found in the cache are continued."""
    wide = Engine(model, TOKENIZER, slots=2)
    engine = Engine(model, TOKENIZER, slots=2, state_dtype=torch.int8, chunk=16, prefixes=PrefixCache(model, 1 << 26))
    assert engine.nbytes < 0.6 * wide.nbytes
    engine.start()
    prompt = tokens(70)
    first, second = (ask(engine, Client(prompt, 8))[0] for _ in range(2))
    engine.close()
    assert first[0][:1] == alone(model, prompt, 8)[:1] and len(first[0]) == len(second[0]) == 8
    assert second[2].usage.cached_tokens == len(prompt)


def test_tokens_that_the_tokenizer_does_not_know_are_not_drawn():
    """A vocabulary is often filled up to a round number."""
    model = LanguageModel(ModelConfig(300, 32, 1, 2), seed=0)
    engine = Engine(model, TOKENIZER)
    engine.start()
    results = ask(engine, *(Client(tokens(5, i), 40, sampling=Sampling(2.0, seed=i)) for i in range(8)))
    engine.close()
    assert all(last.finish == "length" and max(drawn) < 256 for drawn, _, last in results)


def test_a_cancelled_request_frees_its_slot(engine):
    long = [Client(tokens(5, i), 100_000) for i in range(4)]
    engine.submit([client.request for client in long])
    long[0].pieces.get(timeout=60)
    waits = Client(tokens(5), 100_000)
    engine.submit([waits.request])
    waits.request.cancel()
    assert waits.result()[2].finish == "cancelled"
    for client in long:
        client.request.cancel()
    assert [client.result()[2].finish for client in long] == ["cancelled"] * 4
    assert ask(engine, Client(tokens(4)))[0][2].finish == "length"


def test_requests_that_come_and_go_at_random_do_not_disturb_the_others(engine, model):
    rng, stay, leave = random.Random(0), [], []
    for i in range(40):
        client = Client(tokens(1 + i % 37, i), 20 if i % 2 else 100_000, logprobs=0)
        (stay if i % 2 else leave).append(client)
        engine.submit([client.request])
        time.sleep(rng.random() / 50)
        if rng.random() < 0.7:
            rng.choice(leave).request.cancel()
    for client in leave:
        client.request.cancel()
    assert all(client.result()[0] == alone(model, client.request.tokens, 20) for client in stay)
    assert all(client.result()[2].finish == "cancelled" for client in leave)


def test_a_deadline_ends_a_request(engine):
    late = Client(tokens(5), 100_000, deadline=time.monotonic() + 0.2)
    (_, _, last), *_ = ask(engine, late)
    assert last.finish == "timeout" and last.usage.new_tokens < 100_000


def test_a_short_prompt_does_not_wait_for_a_long_one(engine):
    long, short = Client(tokens(200_000), 1), Client(tokens(20), 3)
    engine.submit([long.request])
    while not engine.load.reading:
        time.sleep(0.001)
    (_, _, last), *_ = ask(engine, short)
    assert last.finish == "length" and engine.load.reading == 1
    long.request.cancel()
    assert long.result()[2].finish == "cancelled"


def test_too_many_requests_are_refused_all_or_none(model):
    engine = Engine(model, TOKENIZER, slots=1, queue=2)
    with pytest.raises(QueueFullError, match=r"3 of 3 places are free \(1 in slots, 2 in the queue\)"):
        engine.submit([Client(tokens(3)).request for _ in range(4)])
    assert engine.load.waiting == 0
    engine.submit([Client(tokens(3)).request for _ in range(3)])
    with pytest.raises(QueueFullError, match="no room for 1 more: 0 of 3 places are free"):
        engine.submit([Client(tokens(3)).request])


def test_requests_that_cannot_be_answered_are_refused(engine):
    for prompt, new in ((tokens(0), 3), (tokens(3)[None], 3), (tokens(3), 0)):
        with pytest.raises(ValueError, match=r"a request has tokens \[T >= 1\] and asks for at least one"):
            engine.submit([Client(prompt, new).request])
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1; got 0"):
        Engine(None, None, chunk=0)


def test_closing_lets_requests_end_and_takes_no_more(model):
    engine = Engine(model, TOKENIZER)
    engine.start()
    ends, lasts = Client(tokens(5), 20), Client(tokens(5), 10**8)
    engine.submit([ends.request])
    ends.pieces.get(timeout=60)
    engine.close(grace=60)
    assert ends.result()[2].finish == "length" and not engine.alive
    with pytest.raises(EngineClosedError, match="shutting down"):
        engine.submit([lasts.request])
    engine = Engine(model, TOKENIZER)
    engine.start()
    engine.submit([lasts.request])
    lasts.pieces.get(timeout=60)
    engine.close()
    assert lasts.result()[2].finish == "cancelled"


def test_a_row_that_is_not_finite_ends_alone(engine, model, monkeypatch):
    """A prompt on which the model gives no numbers is answered with an error, and those beside it as ever."""
    step = LanguageModel.step

    def broken(self, x, state):
        logits, after = step(self, x, state)
        return torch.where((x == 77).any(1, keepdim=True), torch.nan, logits), after

    monkeypatch.setattr(LanguageModel, "step", broken)
    good = [tokens(6, seed) for seed in (1, 2)]
    prompts = [good[0], torch.tensor([77] * 6), good[1]]
    results = ask(engine, *(Client(prompt, 3) for prompt in prompts))
    assert [last.finish for _, _, last in results] == ["length", "error", "length"]


def test_a_fault_in_a_step_loses_what_is_in_flight_and_no_more(engine, model, monkeypatch, capsys):
    step = LanguageModel.step

    def broken(self, x, state):
        if (x == 77).any():
            raise RuntimeError("a kernel failed")
        return step(self, x, state)

    monkeypatch.setattr(LanguageModel, "step", broken)
    (_, _, last), *_ = ask(engine, Client(torch.tensor([77] * 6)))
    assert last.finish == "error" and "a kernel failed" in capsys.readouterr().err
    assert ask(engine, Client(tokens(6, 1), 3))[0][2].finish == "length"


class TestPrefixes:
    """States of prompts that were read before."""

    def test_a_prompt_that_was_read_is_not_read_again(self, engine, model):
        prompt = tokens(100)
        ask(engine, Client(prompt))
        (again, _, last), *_ = ask(engine, Client(prompt))
        (longer, _, behind), *_ = ask(engine, Client(torch.cat([prompt, tokens(10, 1)])))
        assert again == alone(model, prompt) and last.usage.cached_tokens == 100
        assert longer == alone(model, torch.cat([prompt, tokens(10, 1)])) and behind.usage.cached_tokens == 100

    def test_a_conversation_goes_on_behind_the_answer(self, engine, model, ahead):
        """A step that was begun ahead has read the last token drawn, too."""
        (drawn, _, _), *_ = ask(engine, Client(tokens(40), 30))
        turn = torch.cat([tokens(40), torch.tensor(drawn), tokens(5, 1)])
        (more, _, last), *_ = ask(engine, Client(turn))
        assert more == alone(model, turn) and last.usage.cached_tokens == 69 + ahead

    def test_where_prompts_part_is_kept_once_the_second_came(self, engine, model):
        shared = tokens(80)
        prompts = [torch.cat([shared, tokens(20, seed)]) for seed in (1, 2, 3)]
        cached = []
        for prompt in prompts:
            (drawn, _, last), *_ = ask(engine, Client(prompt))
            assert drawn == alone(model, prompt)
            cached.append(last.usage.cached_tokens)
        assert cached == [0, 0, 64]

    def test_prompts_read_together_are_kept_each(self, model):
        engine = Engine(model, TOKENIZER, chunk=64, prefixes=PrefixCache(model, 1 << 26))
        engine.start()
        prompts = [tokens(length, length) for length in (40, 47, 43)]
        ask(engine, *map(Client, prompts))
        again = [torch.cat([prompt, tokens(3)]) for prompt in prompts]
        results = ask(engine, *map(Client, again))
        engine.close()
        assert [drawn for drawn, _, _ in results] == [alone(model, prompt) for prompt in again]
        assert [last.usage.cached_tokens for _, _, last in results] == [40, 47, 43]

    def test_the_folder_keeps_what_memory_drops(self, model, tmp_path):
        prompts = [tokens(100, seed) for seed in range(4)]
        for hit in (0, 100):  # the second time a new server, on the same folder
            engine = Engine(model, TOKENIZER, prefixes=PrefixCache(model, 120_000, tmp_path, 1 << 30))
            engine.start()
            for prompt in prompts:
                (drawn, _, last), *_ = ask(engine, Client(prompt))
                assert drawn == alone(model, prompt) and last.usage.cached_tokens == hit
                assert engine.prefixes.nbytes <= 120_000
            engine.close()

    def test_damaged_files_and_those_of_others_are_passed_over(self, model, tmp_path):
        engine = Engine(model, TOKENIZER, prefixes=PrefixCache(model, 1 << 26, tmp_path, 1 << 30))
        engine.start()
        ask(engine, Client(tokens(100)))
        engine.close()
        files = list(tmp_path.glob("*.ctx"))
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:-1])
        (tmp_path / "manual.ctx").write_text("of another program")
        engine = Engine(model, TOKENIZER, prefixes=PrefixCache(model, 1 << 26, tmp_path, 1 << 30))
        engine.start()
        (drawn, _, last), *_ = ask(engine, Client(tokens(100)))
        engine.close()
        assert drawn == alone(model, tokens(100)) and last.usage.cached_tokens == 0

    def test_the_folder_keeps_to_its_limit(self, model, tmp_path):
        size = 300_000
        cache = PrefixCache(model, 1 << 26, tmp_path, size)
        for seed in range(12):
            keys = cache.keys(tokens(64, seed))
            logits, state = model.step(tokens(64, seed)[None], model.init_state(1))
            cache.keep(keys, 64, state, logits.detach())
        cache.close()
        assert 0 < sum(file.stat().st_size for file in tmp_path.glob("*.ctx")) <= size


@pytest.fixture(scope="module")
def hybrid():
    """Power attention, a window, and gated softmax attention."""
    mixers = (MixerConfig("power"), MixerConfig("window", {"window": 9}), MixerConfig("softmax", {"gate": True}))
    return make_every_token_matter(LanguageModel(ModelConfig(256, 32, 3, 2, mixers), seed=0)).eval()


class TestCacheRoom:
    """Key/value caches of softmax attention with room for the longest request, which steps then read as one batch."""

    MOST = 160

    @pytest.fixture(params=[True, False], ids=["", "whole room"])
    def reads_rows(self, request, monkeypatch):
        """As on a CPU, and as on a GPU, which reads the whole room of a cache."""
        for module in ("layers.softmax", "models.slots"):
            monkeypatch.setattr(f"sympow.{module}.reads_rows", lambda device: request.param)

    @pytest.fixture
    def roomy(self, hybrid, reads_rows):
        engine = Engine(hybrid, TOKENIZER, slots=4, chunk=16, most=self.MOST, prefixes=PrefixCache(hybrid, 1 << 26))
        engine.start()
        yield engine
        engine.close()

    def test_requests_up_to_the_longest_are_answered_as_alone(self, roomy, hybrid):
        """More than there are slots. Some reach the limit, in the prompt or in the answer."""
        assert roomy.room.fixed
        lengths = (1, 70, 3, 159, 17, 120, 33, 5, 64, 148)
        new = [self.MOST - n if n in (1, 159, 120, 148) else 9 + i for i, n in enumerate(lengths)]
        results = ask(roomy, *(Client(tokens(n, n), k) for n, k in zip(lengths, new, strict=True)))
        for n, k, (drawn, _, last) in zip(lengths, new, results, strict=True):
            assert drawn == alone(hybrid, tokens(n, n), k) and last.finish == "length"

    def test_requests_that_come_and_go_do_not_disturb_the_others(self, roomy, hybrid):
        stay, leave = [], []
        for i in range(24):
            client = Client(tokens(1 + 5 * i, i), 20 if i % 2 else self.MOST - 1 - 5 * i)
            (stay if i % 2 else leave).append(client)
            roomy.submit([client.request])
            if i % 4 == 2:
                leave[-2].request.cancel()
        for client in leave:
            client.request.cancel()
        assert all(client.result()[0] == alone(hybrid, client.request.tokens, 20) for client in stay)
        assert {client.result()[2].finish for client in leave} <= {"cancelled", "length"}

    def test_states_are_kept_and_continued(self, roomy, hybrid, ahead):
        """After a prompt and after an answer, up to the longest request."""
        (drawn, _, _), *_ = ask(roomy, Client(tokens(40), 30))
        turn = torch.cat([tokens(40), torch.tensor(drawn), tokens(5, 1)])
        for cached in (69 + ahead, 75):
            (more, _, last), *_ = ask(roomy, Client(turn, self.MOST - 75))
            assert more == alone(hybrid, turn, self.MOST - 75) and last.usage.cached_tokens == cached

    def test_a_folder_serves_engines_with_and_without_room(self, hybrid, reads_rows, tmp_path):
        for most, cached in ((self.MOST, 0), (None, 100), (self.MOST, 100)):
            engine = Engine(hybrid, TOKENIZER, most=most, prefixes=PrefixCache(hybrid, 1 << 26, tmp_path, 1 << 30))
            engine.start()
            (drawn, _, last), *_ = ask(engine, Client(tokens(100)))
            engine.close()
            assert drawn == alone(hybrid, tokens(100)) and last.usage.cached_tokens == cached

    def test_longer_requests_are_refused(self, roomy):
        assert roomy.load == (0, 0, 0)
        with pytest.raises(ValueError, match="a request has at most 160 tokens, its answer included; got 161"):
            roomy.submit([Client(tokens(100), 61).request])
        with pytest.raises(ValueError, match="most must be an integer of at least 1; got 0"):
            Engine(None, None, most=0)
        with pytest.raises(ValueError, match="slots must be an integer of at least 1; got None"):
            Engine(None, None, slots=None, most=1)

    def test_it_takes_a_tenth_of_the_memory_beside_the_other_states(self, hybrid, monkeypatch):
        """Otherwise caches grow, and the answers are the same."""
        room = CacheRoom.of(hybrid, 4, self.MOST)
        without = Engine(hybrid, TOKENIZER, slots=4)
        assert without.room is None
        states = 4 * slot_bytes(hybrid, None)
        for free in (states + 10 * room.nbytes, states + 10 * room.nbytes - 1, states - 1):
            monkeypatch.setattr("sympow.models.slots.memory_of", lambda device, free=free: Memory(free, free))
            engine = Engine(hybrid, TOKENIZER, slots=4, most=self.MOST)
            assert engine.room.fixed == (free == states + 10 * room.nbytes)
            assert abs(engine.nbytes - without.nbytes - room.nbytes * engine.room.fixed) < 100  # sums of gates
            engine.start()
            (drawn, _, _), *_ = ask(engine, Client(tokens(30), self.MOST - 30))
            engine.close()
            assert drawn == alone(hybrid, tokens(30), self.MOST - 30)
        monkeypatch.setattr("sympow.models.slots.memory_of", lambda device: None)
        unknown = CacheRoom.of(hybrid, 4, self.MOST)
        assert not unknown.fixed
        assert room_shown(unknown).endswith("is stepped row by row, because the free memory is not known")

    def test_a_model_without_such_caches_has_none(self, model):
        room = CacheRoom.of(model, 4, 1 << 50)
        assert room.nbytes == 0 and not room.fixed


def test_prefixes_of_narrow_states_are_not_found_by_a_server_of_wide_ones(model, tmp_path):
    found = []
    for state_dtype in (None, torch.int8, torch.int8):
        prefixes = PrefixCache(model, 1 << 26, tmp_path, 1 << 30, state_dtype)
        engine = Engine(model, TOKENIZER, slots=2, state_dtype=state_dtype, prefixes=prefixes)
        engine.start()
        found.append(ask(engine, Client(tokens(70), 8))[0][2].usage.cached_tokens)
        engine.close()
    assert found == [0, 0, 70]
