"""Whatever the data is, it becomes batches in which every token counts once and padding never, or says why not."""

import csv
import json
import os
import sys
import warnings
from collections import Counter
from itertools import count, cycle, pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scalewright.calibration.data import Samples, load_samples
from scalewright.calibration.sources import DataOptions
from scalewright.errors import DataError

STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
UNKNOWN, START, END, PAD = range(4)
WORDS = [f"w{i}" for i in range(96)]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ m.role }} {{ m.content }} {% endfor %}"
)
GIVE_SOME = "Give data that has text or token ids in it."
FROM_A_FILE = "Write what comes out of it to a file, and give that."
FEW = "{0} tokens are little to calibrate with; scales may not fit other text. Give 2048 or more."


def make_tokenizer(
    *, template: str | None = CHAT_TEMPLATE, ends: bool = False, **special: str
) -> PreTrainedTokenizerFast:
    """A word is a token; texts begin with <s> and, if asked for, end with </s>."""
    words = ["<unk>", "<s>", "</s>", "<pad>", *WORDS, "system", "user", "assistant"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", START), ("</s>", END)]
    )
    special = special or {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=8, chat_template=template, **special)


TOKENIZER = make_tokenizer()


def word_ids(*numbers: int) -> list[int]:
    return [4 + each for each in numbers]


def load(data, tokenizer=TOKENIZER, vocab_size=None, max_positions=None, **options) -> Samples:
    make = None if tokenizer is None else lambda: tokenizer
    return load_samples(
        data, DataOptions(**options), tokenizer=make, vocab_size=vocab_size, max_positions=max_positions
    )


def no_tokenizer():
    raise AssertionError("a tokenizer was asked for")


def sequences(samples: Samples) -> list[list[int]]:
    """The sequences of all batches without their padding."""
    return [
        ids[keep.bool()].tolist()
        for batch in samples.batches
        for ids, keep in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def error(data, tokenizer=TOKENIZER, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(data, tokenizer, **options)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


THREE = ["w1 w2", "w3", "w4 w5 w6"]
THREE_IDS = [[START, *word_ids(1, 2)], [START, *word_ids(3)], [START, *word_ids(4, 5, 6)]]
ROWS = [{"id": i, "text": text} for i, text in enumerate(THREE)]
CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
CHAT_IDS = TOKENIZER.convert_tokens_to_ids(["user", "w1", "assistant", "w2"])


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


# ---- every kind of data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        THREE,
        tuple(THREE),
        np.array(THREE),
        (text for text in THREE),
        ROWS,
        Rows(ROWS),
        Stream(ROWS),
        iter(ROWS),
        {"text": THREE, "id": [1, 2]},
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}),
        datasets.Dataset.from_list(ROWS).to_pandas(),
        datasets.Dataset.from_list(ROWS).to_pandas()["text"],
    ],
    ids=lambda data: f"{type(data).__module__}.{type(data).__name__}",
)
def test_texts_in_memory_are_all_there(data):
    assert sorted(sequences(load(data))) == sorted(THREE_IDS)


def test_one_row_is_one_sample():
    assert sequences(load({"text": "w1 w2", "tags": ["w9"]})) == [THREE_IDS[0]]


@pytest.mark.parametrize("column", [None, "text"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".JSON", ".csv", ".parquet"])
def test_files_with_columns(tmp_path, suffix, column):
    path = tmp_path / f"calib{suffix}"
    if suffix == ".jsonl":
        write(path, "\n\n".join(json.dumps(row) for row in ROWS))
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.DictWriter(file, ["id", "text"]).writeheader()
            csv.DictWriter(file, ["id", "text"]).writerows(ROWS)
    elif suffix == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    else:
        write(path, json.dumps(ROWS, indent=1))
    for name in (path, str(path)):
        assert sorted(sequences(load(name, column=column))) == sorted(THREE_IDS)


def test_a_named_column_is_the_one_that_is_read(tmp_path):
    rows = [{"text": "w1", "story": "w9 w8"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    data = [
        rows,
        datasets.Dataset.from_list(rows),
        tmp_path / "a.parquet",
        write(tmp_path / "a.json", json.dumps(rows)),
    ]
    for each in data:
        assert sequences(load(each, column="story")) == [[START, *word_ids(9, 8)]]
        assert sequences(load(each)) == [[START, *word_ids(1)]]


@pytest.mark.parametrize(
    "data",
    [
        THREE,
        {"version": 1, "data": THREE},
        {"train": ROWS, "test": [{"text": "w9"}]},
        {"text": THREE, "id": [0, 1, 2]},
        {"name": "stories", "rows": ROWS},
    ],
    ids=["texts", "wrapped texts", "splits", "columns", "wrapped rows"],
)
def test_json_has_many_shapes(tmp_path, data):
    assert sorted(sequences(load(write(tmp_path / "a.json", json.dumps(data))))) == sorted(THREE_IDS)


def test_a_column_of_wrapped_rows_can_be_named(tmp_path):
    data = {"version": 1, "data": [{"text": "w9", "story": "w1 w2"}]}
    assert sequences(load(write(tmp_path / "a.json", json.dumps(data)), column="story")) == [THREE_IDS[0]]
    assert sequences(load({"story": ["w1 w2"], "n": 1}, column="story")) == [THREE_IDS[0]]


def test_json_with_a_value_on_each_line_is_read_too(tmp_path):
    path = write(tmp_path / "a.json", "".join(json.dumps(row) + "\n" for row in ROWS))
    assert sorted(sequences(load(path))) == sorted(THREE_IDS)


def test_a_line_separator_inside_json_does_not_end_the_line(tmp_path):
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "w1\u2028w2\u0085w3"}, ensure_ascii=False))
    assert sequences(load(path)) == [[START, *word_ids(1, 2, 3)]]


def test_csv_keeps_new_lines_inside_a_field_and_a_mark_of_order_is_no_letter(tmp_path):
    path = write(tmp_path / "a.csv", '\ufefftext,n\n"w1\nw2",1\n"w3, w4",2\n')
    found = sequences(load(path))
    assert sorted(found) == sorted([[START, *word_ids(1, 2)], [START, UNKNOWN, *word_ids(4)]])


def test_documents_in_a_text_file_are_samples(tmp_path):
    path = write(tmp_path / "a.txt", "w1 w2\n<|endoftext|>\n\nw3\n<|endoftext|>\nw4\nw5 w6<|endoftext|>\n")
    assert sorted(sequences(load(path))) == sorted(THREE_IDS)


def test_lines_of_a_text_file_are_running_text(tmp_path):
    path = write(tmp_path / "a.txt", "w1 w2\r\nw3\n\nw4 w5\n")
    assert sequences(load(path, max_seq_length=100)) == [[START, *word_ids(1, 2, 3, 4, 5), END]]


def test_lines_of_a_text_file_are_samples_if_they_shall_not_be_packed(tmp_path):
    path = write(tmp_path / "a.txt", "w1 w2\nw3\n\nw4 w5 w6\n")
    assert sorted(sequences(load(path, pack=False))) == sorted(THREE_IDS)


@pytest.mark.parametrize("break_at", [" ", "\n"])
def test_running_text_keeps_its_order_in_long_stretches_and_loses_nothing(tmp_path, break_at):
    numbers = [i % 96 for i in range(2000)]
    path = write(tmp_path / "a.txt", break_at.join(f"w{i}" for i in numbers))
    samples = load(path, max_seq_length=64)
    tokens = [each for sequence in sequences(samples) for each in sequence]
    words = Counter(each - 4 for each in tokens if each > PAD)
    assert words == Counter(numbers)
    follows = sum(b == (a + 1 if a < 99 else 4) for a, b in pairwise(tokens))
    assert follows > 1900
    assert sequences(load(path, max_seq_length=64, seed=1)) != sequences(samples)


def test_running_text_is_cut_between_lines_if_possible(tmp_path):
    path = write(tmp_path / "a.txt", "w1 w2 w3 w4 w5\n" * 100)
    tokens = [each for sequence in sequences(load(path, max_seq_length=16)) for each in sequence]
    starts = [after for token, after in pairwise(tokens) if token == START]
    assert len(starts) > 10
    assert set(starts) == {5}


def test_text_without_any_break_is_cut_all_the_same(tmp_path):
    path = write(tmp_path / "a.txt", "x" * 1000)
    assert sequences(load(path, max_seq_length=50))[0][:3] == [START, UNKNOWN, END]


@pytest.mark.parametrize(
    "data",
    [
        [CHAT],
        CHAT,
        (CHAT,),
        {"messages": CHAT},
        {"messages": [CHAT]},
        [{"messages": CHAT, "n": 1}],
        [{"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]}],
        [{"from": "user", "value": "w1"}, {"from": "chatgpt", "value": "w2"}],
        datasets.Dataset.from_list([{"messages": CHAT}]),
    ],
    ids=["list", "one", "tuple", "one row", "column", "rows", "ShareGPT", "one of ShareGPT", "Dataset"],
)
def test_chats_go_through_the_template_without_further_special_tokens(data):
    assert sequences(load(data)) == [CHAT_IDS]


def test_chats_in_a_jsonl_file(tmp_path):
    assert sequences(load(write(tmp_path / "a.jsonl", json.dumps({"messages": CHAT})))) == [CHAT_IDS]
    assert sequences(load(write(tmp_path / "b.jsonl", json.dumps(CHAT)))) == [CHAT_IDS]


def test_the_column_content_is_text_where_one_asks_for_it():
    assert sorted(sequences(load(CHAT, column="content"))) == [[START, 5], [START, 6]]


# ---- token ids -------------------------------------------------------------------------------------------------------

IDS = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]


@pytest.mark.parametrize(
    "data",
    [
        IDS,
        [tuple(each) for each in IDS],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        np.array(IDS),
        [torch.tensor(each) for each in IDS],
        [torch.tensor([each]) for each in IDS],
        [np.array(each, dtype=np.uint16) for each in IDS],
        [[np.int64(each) for each in ids] for ids in IDS],
        [{"input_ids": each, "text": "w1"} for each in IDS],
        [{"input_ids": torch.tensor(each), "attention_mask": torch.ones(3)} for each in IDS],
        {"input_ids": IDS, "attention_mask": [[1] * 3] * 3},
        {"input_ids": np.array(IDS)},
        Rows([{"input_ids": each} for each in IDS]),
        datasets.Dataset.from_dict({"input_ids": IDS, "attention_mask": [[1] * 3] * 3}),
        datasets.Dataset.from_dict({"input_ids": IDS}).with_format("torch"),
        datasets.Dataset.from_dict({"input_ids": IDS}).with_format("numpy"),
        (each for each in IDS),
    ],
)
def test_token_ids_need_no_tokenizer(data):
    samples = load_samples(data, DataOptions(), tokenizer=no_tokenizer)
    assert sorted(sequences(samples)) == IDS
    assert (samples.num_samples, samples.num_tokens) == (3, 9)
    assert all(batch["input_ids"].dtype == torch.int64 for batch in samples.batches)


@pytest.mark.parametrize("make", [list, torch.tensor, np.array, range, tuple])
def test_one_run_of_tokens_is_cut_into_sequences(make):
    data = range(20) if make is range else make(list(range(20)))
    found = sequences(load_samples(data, DataOptions(max_seq_length=8), tokenizer=no_tokenizer))
    assert sorted(found) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


@pytest.mark.parametrize("as_dataset", [list, datasets.Dataset.from_list])
def test_padding_of_tokenised_rows_is_left_out(as_dataset):
    rows = [
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 0, 0, 7], "attention_mask": [0, 0, 0, 1]},
    ]
    assert sequences(load(as_dataset(rows))) == [[5, 6], [7]]


def test_token_ids_in_files(tmp_path):
    datasets.Dataset.from_dict({"input_ids": IDS}).to_parquet(tmp_path / "a.parquet")
    files = [
        tmp_path / "a.parquet",
        write(tmp_path / "a.json", json.dumps(IDS)),
        write(tmp_path / "a.jsonl", "\n".join(json.dumps({"input_ids": each}) for each in IDS)),
    ]
    for file in files:
        assert sorted(sequences(load_samples(file, DataOptions(), tokenizer=no_tokenizer))) == IDS


# ---- the choice of samples -------------------------------------------------------------------------------------------

MANY = [f"w{i % 96} w{i // 96}" for i in range(900)]


@pytest.mark.parametrize("make", [list, lambda texts: datasets.Dataset.from_dict({"text": texts})])
def test_a_seed_chooses_samples(make):
    chosen = [sequences(load(make(MANY), num_samples=20, seed=seed)) for seed in (3, 3, 4)]
    assert chosen[0] == chosen[1]
    assert len({tuple(each) for each in chosen[0]}) == 20
    common = {tuple(each) for each in chosen[0]} & {tuple(each) for each in chosen[2]}
    assert len(common) < 5


def test_the_choice_is_the_same_in_a_list_a_dataset_and_a_file(tmp_path):
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in MANY))
    data = [MANY, datasets.Dataset.from_dict({"text": MANY}), path, str(path)]
    first, *others = [sequences(load(each, num_samples=9, seed=5)) for each in data]
    assert all(each == first for each in others)


def test_every_sample_is_as_likely_as_another():
    seen = Counter(sequence[0] for seed in range(600) for sequence in sequences(load(IDS, num_samples=1, seed=seed)))
    assert set(seen) == {5, 8, 11}
    assert min(seen.values()) > 150


def test_only_what_is_chosen_is_read():
    class Counting(Rows):
        num_read = 0

        def __getitem__(self, i):
            self.num_read += 1
            return self.rows[i]

    rows = Counting(MANY)
    load(rows, num_samples=20)
    assert rows.num_read <= 25


def test_a_stream_is_taken_in_its_order_and_only_as_far_as_needed():
    stream = (f"w{i}" for i in count())
    assert sequences(load(stream, num_samples=3)) == [[START, 4], [START, 5], [START, 6]]
    assert next(stream) == "w3"
    assert len(sequences(load(cycle(["w1 w2"]), num_samples=2, max_seq_length=10, pack=True))) == 2


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_empty_samples_are_not_counted(empty):
    rows = [{"text": empty if i % 2 else f"w{i}"} for i in range(40)]
    for data in (rows, datasets.Dataset.from_list(rows)):
        samples = load(data, num_samples=20)
        assert samples.num_samples == 20
        assert sorted(each[1] - 4 for each in sequences(samples)) == list(range(0, 40, 2))
        assert "samples were asked for" not in " ".join(samples.notes)


def test_an_empty_mask_or_row_of_ids_is_an_empty_sample():
    rows = [{"input_ids": [5], "attention_mask": [0]}, {"input_ids": [], "attention_mask": []}, {"input_ids": [6]}]
    assert sequences(load([*rows, {"input_ids": None, "attention_mask": [1]}])) == [[6]]


# ---- cutting, packing, batches ---------------------------------------------------------------------------------------


def test_what_is_too_long_is_cut_and_the_tokenizer_neither_warns_nor_remembers(caplog, capsys):
    tokenizer = make_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = load([" ".join(WORDS)], tokenizer, max_seq_length=20)
    assert sequences(samples) == [[START, *word_ids(*range(19))]]
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.deprecation_warnings == {}
    assert "longer than" not in caplog.text + capsys.readouterr().err


def test_packing_joins_texts_with_an_end_between_them():
    samples = load(THREE, pack=True, max_seq_length=4)
    joined = [each for sequence in sequences(samples) for each in sequence]
    assert [len(each) for each in sequences(samples)] == [4, 4, 4]
    order = [int(each) for each in torch.tensor([joined.index(ids[1]) for ids in THREE_IDS]).argsort()]
    assert joined == [each for i in order for each in [*THREE_IDS[i], END]]


def test_packing_adds_no_second_end():
    ending = make_tokenizer(ends=True)
    assert sequences(load(["w1"] * 3, ending, pack=True)) == [[START, 5, END] * 3]


def test_packing_adds_no_end_to_chats_or_ids_or_where_there_is_none():
    assert sequences(load([CHAT, CHAT], pack=True)) == [CHAT_IDS * 2]
    assert sequences(load([[5, 6], [5, 6]], pack=True)) == [[5, 6, 5, 6]]
    assert sequences(load(["w1"] * 2, make_tokenizer(unk_token="<unk>"), pack=True)) == [[START, 5] * 2]


def test_packing_stops_when_there_is_enough():
    samples = load(MANY, pack=True, num_samples=3, max_seq_length=32)
    assert [len(each) for each in sequences(samples)] == [32, 32, 32]


@st.composite
def id_lists(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]


@given(
    data=id_lists(),
    batch_size=st.none() | st.integers(1, 8),
    length=st.integers(1, 45),
    pack=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_token_counts_once_and_padding_never(data, batch_size, length, pack, seed):
    samples = load(data, batch_size=batch_size, max_seq_length=length, pack=pack, seed=seed, num_samples=10_000)
    wanted = [each for ids in data for each in (ids if pack else ids[:length])]
    found = sequences(samples)
    assert sorted(each for sequence in found for each in sequence) == wanted
    assert samples.num_tokens == len(wanted)
    assert samples.num_samples == len(found)
    if pack:
        assert [len(each) for each in found[:-1]] == [length] * (len(found) - 1)
    else:
        assert sorted(found) == sorted(ids[:length] for ids in data)
    for batch in samples.batches:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert set(batch) == {"input_ids", "attention_mask"}
        assert ids.shape == mask.shape
        assert ids.shape[1] == mask[0].sum() <= length
        assert bool((mask.diff(dim=1) <= 0).all())  # tokens first, then padding
        assert bool((ids[mask == 0] == 0).all())
    widths = [batch["input_ids"].shape[1] for batch in samples.batches]
    assert widths == sorted(widths, reverse=True)
    if batch_size is not None:
        assert {len(batch["input_ids"]) for batch in samples.batches[:-1]} <= {batch_size}
        assert len(samples.batches[-1]["input_ids"]) <= batch_size


def test_batches_have_about_2048_tokens_if_nothing_is_said():
    data = [[1] * length for length in (*[3000] * 2, *[1000] * 5, *[700] * 4, *[10] * 300)]
    shapes = [tuple(batch["input_ids"].shape) for batch in load(data, max_seq_length=4096).batches]
    assert shapes == [(1, 3000), (1, 3000), (2, 1000), (2, 1000), (2, 1000), (2, 700), (2, 700), (204, 10), (95, 10)]


def test_samples_of_one_length_keep_the_order_in_which_they_were_chosen():
    chosen = sequences(load(IDS, seed=2, batch_size=1))
    assert chosen == sequences(load(IDS, seed=2))
    assert len({tuple(map(tuple, sequences(load(IDS, seed=seed)))) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, PAD),
        ({"eos_token": "</s>", "unk_token": "<unk>"}, END),
        ({"unk_token": "w7"}, 11),
        ({"bos_token": "<s>"}, 0),
    ],
)
def test_padding_is_a_token_that_the_tokenizer_has(special, pad):
    (batch,) = load(["w1 w2", "w3"], make_tokenizer(**special)).batches
    assert batch["input_ids"].tolist() == [[START, 5, 6], [START, 7, pad]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_no_sequence_is_longer_than_the_model_can_take():
    data = [[i] * 100 for i in range(30)]
    samples = load(data, max_positions=80, num_samples=30)
    assert {len(each) for each in sequences(samples)} == {80}
    assert samples.notes == [
        "max_seq_length: 2048 is more than the model's 80 positions; sequences have 80 tokens at the most."
    ]
    assert load(data, max_positions=80, max_seq_length=80, num_samples=30).notes == []


# ---- ready batches ---------------------------------------------------------------------------------------------------

BATCH = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}


@pytest.mark.parametrize(
    ("data", "num_batches"),
    [
        ([BATCH, BATCH], 2),
        ((BATCH, BATCH), 2),
        (BATCH, 1),
        (iter([BATCH, BATCH, BATCH]), 3),
        (DataLoader([BATCH, BATCH], batch_size=None), 2),
    ],
)
def test_ready_batches_are_used_as_they_are(data, num_batches):
    samples = load_samples(data, DataOptions(), tokenizer=no_tokenizer)
    assert len(samples.batches) == num_batches
    for batch in samples.batches:
        assert batch["input_ids"] is BATCH["input_ids"]
        assert batch["attention_mask"] is BATCH["attention_mask"]
        assert batch is not BATCH
    assert (samples.num_samples, samples.num_tokens) == (2 * num_batches, 5 * num_batches)


@pytest.mark.parametrize("collate", [None, torch.stack, lambda rows: {"input_ids": torch.stack(rows)}])
def test_a_data_loader_of_ids_gives_batches(collate):
    loader = DataLoader(list(torch.arange(12).reshape(4, 3)), batch_size=2, collate_fn=collate)
    samples = load_samples(loader, DataOptions(), tokenizer=no_tokenizer)
    assert [batch["input_ids"].tolist() for batch in samples.batches] == [
        [[0, 1, 2], [3, 4, 5]],
        [[6, 7, 8], [9, 10, 11]],
    ]
    assert (samples.num_samples, samples.num_tokens) == (4, 12)


def test_a_data_loader_of_one_tensor_gives_batches():
    loader = DataLoader(TensorDataset(torch.arange(12).reshape(4, 3)), batch_size=4)
    (batch,) = load(loader).batches
    assert batch["input_ids"].tolist() == torch.arange(12).reshape(4, 3).tolist()


def test_tensors_of_several_samples_are_batches():
    ids = torch.arange(12).reshape(4, 3)
    assert [batch["input_ids"].tolist() for batch in load([ids, ids]).batches] == [ids.tolist()] * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: {"input_ids": ids}])
def test_ids_of_any_integers_become_what_an_embedding_takes(dtype, wrap):
    (batch,) = load([wrap(torch.tensor([[1, 2], [3, 4]]).to(dtype))], vocab_size=8).batches
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].tolist() == [[1, 2], [3, 4]]


def test_batches_are_taken_until_there_are_enough_samples():
    def batches():
        while True:
            yield BATCH

    for data in (batches(), DataLoader(Rows([BATCH] * 50), batch_size=None)):
        samples = load(data, num_samples=5)
        assert (len(samples.batches), samples.num_samples, samples.num_tokens) == (3, 6, 15)


def test_batches_may_have_whatever_a_model_takes():
    batch = {"pixel_values": torch.zeros(2, 7, 4), "n": 3}
    samples = load([batch], num_samples=2)
    assert samples.batches == [batch]
    assert (samples.num_samples, samples.num_tokens) == (2, 14)
    masked = {"attention_mask": torch.zeros(2, 1, 5, 5), "input_ids": torch.ones(2, 5, dtype=torch.long)}
    assert load([masked]).num_tokens == 10


def test_what_ready_batches_cannot_do_is_said():
    batch = {"input_ids": torch.ones(4, 600, dtype=torch.long)}
    assert load([batch], num_samples=4, batch_size=2, max_seq_length=500).notes == [
        "data: its batches are used as they are, not in batches of 2.",
        "data: its batches are used as they are, with up to 600 tokens in a sequence, more than 500.",
    ]
    assert load([batch], num_samples=4, max_seq_length=600).notes == []
    assert load([batch]).notes == ["data: 512 samples were asked for, and there are 4."]
    assert load([BATCH], num_samples=2).notes == ["data: " + FEW.format(5)]
    assert error([batch], pack=True) == (
        "data: its batches are ready, and cannot be packed. Leave pack out, or give token ids."
    )
    assert error([batch], column="text") == "data: has no columns. Leave column 'text' out."
    assert error(DataLoader([BATCH], batch_size=None), column="text") == (
        "data: has no columns. Leave column 'text' out."
    )


WHAT_A_BATCH_IS = "A batch is a dict of tensors that the model is called with, or token ids [samples, tokens]."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader([], batch_size=2), f"data: there is nothing in it. {GIVE_SOME}"),
        ([{"input_ids": torch.zeros(0, 4, dtype=torch.long)}], f"data: there is nothing in it. {GIVE_SOME}"),
        (DataLoader(THREE, batch_size=3), f"data: batch 1 is a list with str. {WHAT_A_BATCH_IS}"),
        (
            DataLoader(ROWS[:1], batch_size=None),
            f"data: batch 1 is a dict without tensors (id, text). {WHAT_A_BATCH_IS}",
        ),
        ([BATCH, "w1"], f"data: batch 2 is str. {WHAT_A_BATCH_IS}"),
        ([BATCH, None], f"data: batch 2 is None. {WHAT_A_BATCH_IS}"),
        (DataLoader([1.5, 2.5], batch_size=2), f"data: batch 1 is Tensor. {WHAT_A_BATCH_IS}"),
        (DataLoader(torch.rand(4, 3) > 0.5, batch_size=2), f"data: batch 1 is Tensor. {WHAT_A_BATCH_IS}"),
        (DataLoader(torch.rand(4, 3), batch_size=2), f"data: batch 1 is Tensor. {WHAT_A_BATCH_IS}"),
    ],
)
def test_what_is_no_batch_is_named(data, message):
    assert error(data) == message


# ---- too little, and not known ---------------------------------------------------------------------------------------


def test_too_little_data_is_said(tmp_path):
    enough = [[1] * 1024, [2] * 1024]
    assert load(enough, num_samples=2).notes == []
    assert load(enough).notes == ["data: 512 samples were asked for, and there are 2."]
    assert load([*enough[:1], [1] * 1023], num_samples=2).notes == ["data: " + FEW.format(2047)]
    path = write(tmp_path / "a.txt", "w1 w2")
    assert load(path, max_seq_length=64).notes == [
        "a.txt: 512 samples were asked for, and there are 1 once they are packed into sequences of 64 tokens.",
        "a.txt: " + FEW.format(4),
    ]


def test_samples_that_are_copies_are_said():
    """4096 tokens of which a weight learns no more than of 1024."""
    said = "data: of 4 samples {0} are different, and the others are copies, which say nothing new. Give other text."
    one, two, three = ([i] * 1024 for i in (1, 2, 3))
    assert load([one] * 4, num_samples=4).notes == [said.format(1)]
    assert load([one, two] * 2, num_samples=4).notes == [said.format(2)]
    assert load([one, one, two, three], num_samples=4).notes == []
    assert load([one] * 4, num_samples=4, is_calibration=False).notes == []


def test_text_outside_the_vocabulary_is_said():
    known = " ".join(WORDS * 30)
    assert load([known], max_seq_length=4096, num_samples=1).notes == []
    assert load([known + " what" * 40], max_seq_length=4096, num_samples=1).notes == []
    assert load([known + " what" * 720], max_seq_length=4096, num_samples=1).notes == [
        "data: 20% of its tokens stand for text outside the vocabulary. Is it text that the model knows?"
    ]


def test_only_tokens_that_are_used_are_looked_up():
    notes = load([" ".join(WORDS * 30) + " what" * 720], max_seq_length=2048, num_samples=1).notes
    assert notes == []


@pytest.mark.parametrize("vocab_size", [10, None])
def test_token_ids_outside_the_vocabulary_are_named(vocab_size):
    batch = {"input_ids": torch.tensor([[1, -7, 3]])}
    of = "" if vocab_size is None else f" of {vocab_size} tokens"
    for data in ([[1, 2], [3, -7]], [batch]):
        assert error(data, vocab_size=vocab_size) == (
            f"data: token id -7 is outside the model's vocabulary{of}. Use the model's own tokenizer."
        )
    assert error([[2**70]], vocab_size=vocab_size) == (
        f"data: token id {2**70} is outside the model's vocabulary{of}. Use the model's own tokenizer."
    )


def test_the_first_token_id_outside_is_the_size_of_the_vocabulary():
    for make in (list, lambda ids: [{"input_ids": torch.tensor(ids)}]):
        assert error(make([[1, 10], [1, 2]]), vocab_size=10) == (
            "data: token id 10 is outside the model's vocabulary of 10 tokens. Use the model's own tokenizer."
        )
        assert load(make([[1, 9], [0, 2]]), vocab_size=10).num_tokens == 4
    assert "token id 99 is outside" in error(["w95"], vocab_size=99)


# ---- what cannot be used ---------------------------------------------------------------------------------------------

WHAT_DATA_IS = "Give a list of texts, a file, a dataset, token ids or batches."
WHAT_A_SAMPLE_IS = "A sample is text, chat messages or token ids."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], f"data: there is nothing in it. {GIVE_SOME}"),
        ((), f"data: there is nothing in it. {GIVE_SOME}"),
        (iter(()), f"data: there is nothing in it. {GIVE_SOME}"),
        (torch.zeros(0, 3, dtype=torch.long), f"data: there is nothing in it. {GIVE_SOME}"),
        (torch.zeros(0, dtype=torch.long), f"data: there is nothing in it. {GIVE_SOME}"),
        (datasets.Dataset.from_dict({"text": []}), f"data: there is nothing in it. {GIVE_SOME}"),
        ({"text": []}, f"data: there is nothing in it. {GIVE_SOME}"),
        ([""], f"data: all its samples are empty. {GIVE_SOME}"),
        ([[], []], f"data: all its samples are empty. {GIVE_SOME}"),
        ([{"text": None}], f"data: all its samples are empty. {GIVE_SOME}"),
        (None, f"data: None is no data. {WHAT_DATA_IS}"),
        (5, f"data: int is no data. {WHAT_DATA_IS}"),
        (1.5, f"data: float is no data. {WHAT_DATA_IS}"),
        (torch.tensor(3), f"data: Tensor is no data. {WHAT_DATA_IS}"),
        (b"w1", f"data: bytes is no data. {WHAT_DATA_IS}"),
        ({"w1", "w2"}, f"data: set is no data. {WHAT_DATA_IS}"),
        (len, f"data: builtin_function_or_method is no data. {WHAT_DATA_IS}"),
        ([1.5], f"data: sample 1 is float. {WHAT_A_SAMPLE_IS}"),
        ([None], f"data: sample 1 is None. {WHAT_A_SAMPLE_IS}"),
        ([b"w1"], f"data: sample 1 is bytes. {WHAT_A_SAMPLE_IS}"),
        ([[1, 2.5]], f"data: sample 1 is a list with float. {WHAT_A_SAMPLE_IS}"),
        ([[True, False]], f"data: sample 1 is a list with bool. {WHAT_A_SAMPLE_IS}"),
        ([["w1", "w2"]], f"data: sample 1 is a list with str. {WHAT_A_SAMPLE_IS}"),
        (torch.rand(1, 3), f"data: sample 1 is a list with float. {WHAT_A_SAMPLE_IS}"),
        (torch.rand(3), f"data: sample {{}} is float. {WHAT_A_SAMPLE_IS}"),
        (torch.ones(1, 3, dtype=torch.bool), f"data: sample 1 is a list with bool. {WHAT_A_SAMPLE_IS}"),
        (np.ones((1, 2, 3), dtype=int), f"data: sample 1 is a list with list. {WHAT_A_SAMPLE_IS}"),
        ((each for each in [1, 2]), f"data: sample 1 is int. {WHAT_A_SAMPLE_IS}"),
        ([{"text": 3}], f"data: sample 1 is int. {WHAT_A_SAMPLE_IS}"),
        ([{"text": {"a": 1}}], f"data: sample 1 is dict. {WHAT_A_SAMPLE_IS}"),
        (
            [[{"a": 1}]],
            "data: sample 1 has a message without 'role' or 'from'. It has: a. Give each a role and a content.",
        ),
        (
            [[{"role": "elf", "content": ""}]],
            "data: sample 1: the chat template refuses it (no role elf). Mend it, or give texts.",
        ),
        ("", "data: '' is neither a file nor a dataset. Give texts as a list of them."),
        ("w1 w2", "data: 'w1 w2' is neither a file nor a dataset. Give texts as a list of them."),
        ({"input_ids": [[1], [2]], "attention_mask": [[1]]}, "data: columns have 2 and 1 rows. Give as many of each."),
        (
            {"input_ids": [[1], [2]], "attention_mask": 3},
            "data: its column 'attention_mask' is int. Give a list with a row for each sample.",
        ),
        (
            [{"input_ids": [1, 2], "attention_mask": [1]}],
            "data: sample 1 has 2 token ids and a mask of 1. Give as many of both.",
        ),
        ([{"input_ids": [1, 2], "attention_mask": 1}], "data: sample 1 has a mask that is int. Give a list of them."),
        ([{"input_ids": 1, "attention_mask": 1}], f"data: sample 1 is int. {WHAT_A_SAMPLE_IS}"),
        ({"text": {"a": ["w1"]}}, f"data: sample 1 is dict. {WHAT_A_SAMPLE_IS}"),
        (
            ["w1 \ud800"],
            "data: sample 1 has half of a character in it (\\ud800), which no tokenizer can read. Take it out.",
        ),
    ],
)
def test_what_is_no_data_is_named(data, message):
    found = error(data)
    assert found in [message.format(number) for number in (1, 2, 3)]


def test_a_long_text_is_not_taken_for_a_file_name():
    assert error("w1 " * 5000) == (
        f"data: '{('w1 ' * 12)}... is neither a file nor a dataset. Give texts as a list of them."
    )


def test_mixed_samples_are_named():
    pair = {1: "text", 2: "token ids"}
    found = error(["w1", [1, 2]])
    first, second = (2, 1) if found.startswith("data: sample 1") else (1, 2)
    assert found == (
        f"data: sample {second} is {pair[second]}, and sample {first} is {pair[first]}. Give samples of one kind."
    )
    assert error(iter(["w1", "w2", CHAT])) == (
        "data: sample 3 is chat messages, and sample 1 is text. Give samples of one kind."
    )
    assert (
        error(iter([{"text": "w1"}, "w2"]))
        == "data: sample 2 is str, and others have columns. Give samples of one kind."
    )
    assert error([{"text": "w1"}, None]) == "data: sample 2 is None, and others have columns. Give samples of one kind."
    assert (
        error(iter([{"text": "w1"}, {"content": "w2", "n": 1}]))
        == "data: sample 2 has no 'text'. It has: content, n. Give it to all, or name another column."
    )


@pytest.mark.parametrize(
    "make", [list, datasets.Dataset.from_list, lambda rows: {"train": datasets.Dataset.from_list(rows)}]
)
def test_a_wrong_column_is_named_with_the_nearest(make):
    rows = [{"story": "w1", "n": 1}]
    assert error(make(rows), column="sotry") == (
        "data: there is no column 'sotry'. Did you mean 'story'? Columns: story, n. Name one of them as column."
    )
    assert error(make(rows)) == (
        "data: there is no column that is known. Columns: story, n. Name one of them as column."
    )


def test_a_wrong_column_of_a_file_is_named_with_the_nearest(tmp_path):
    rows = [{"story": "w1", "n": 1}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    write(tmp_path / "a.csv", "story,n\nw1,1,2\n")
    write(tmp_path / "a.json", json.dumps(rows))
    for name in ("a.parquet", "a.csv", "a.json"):
        assert error(tmp_path / name, column="sotry") == (
            f"{name}: there is no column 'sotry'. Did you mean 'story'? Columns: story, n. Name one of them as column."
        )


def test_names_of_columns_are_shortened_where_they_are_texts(tmp_path):
    path = write(tmp_path / "a.csv", ",".join(["w" * 100, *(f"c{i}" for i in range(30))]) + "\n" + "1," * 30 + "1\n")
    shown = ", ".join(["w" * 37 + "...", *(f"c{i}" for i in range(19)), "..."])
    assert error(path) == f"a.csv: there is no column that is known. Columns: {shown}. Name one of them as column."


def test_a_column_where_there_is_none_is_an_error(tmp_path):
    data = [THREE, IDS, iter(THREE), write(tmp_path / "a.json", json.dumps(THREE))]
    files = [write(tmp_path / "a.txt", "w1"), write(tmp_path / "b.txt", "w1<|endoftext|>w2")]
    for each in (*data, *files):
        name = each.name if isinstance(each, Path) else "data"
        assert error(each, column="text") == f"{name}: has no columns. Leave column 'text' out."
    assert error(files[0], column="text", pack=False) == "a.txt: has no columns. Leave column 'text' out."


def test_a_split_that_is_not_there_is_named():
    data = datasets.DatasetDict(training=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS))
    assert error(data) == "data: there is no split 'train'. Did you mean 'training'? Splits: training, test."
    assert load(data, split="test").num_samples == 3


def test_more_samples_than_can_be_counted_are_all_there_are():
    assert load(["w1", "w2"], num_samples=10**30).num_samples == 2


@pytest.mark.parametrize("option", ["num_samples", "max_seq_length", "batch_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_are_1_or_more(option, value):
    called = "num_calibration_samples" if option == "num_samples" else option
    with pytest.raises(DataError, match=rf"^{called}: is {value}\. Use 1 or more\.$"):
        DataOptions(**{option: value})


# ---- tokenizers that are not there -----------------------------------------------------------------------------------


def test_text_without_a_tokenizer_is_said():
    assert error(THREE, None) == "data: there is text in it, and no tokenizer. Give one, or give token ids."
    assert error([CHAT], None) == "data: there is text in it, and no tokenizer. Give one, or give token ids."


def test_chats_without_a_template_are_said():
    assert error([CHAT], make_tokenizer(template=None)) == (
        "data: there are chat messages in it, and the tokenizer has no chat template. Give texts, or a tokenizer that "
        "has one."
    )


def test_what_is_no_tokenizer_is_said():
    assert error(THREE, TOKENIZER.backend_tokenizer) == (
        "data: Tokenizer is no tokenizer of transformers. Give one of these."
    )


def test_the_tokenizer_is_asked_for_once():
    calls = []
    load_samples(THREE, DataOptions(), tokenizer=lambda: calls.append(1) or TOKENIZER)
    assert calls == [1]


# ---- files that cannot be read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("text", ["", "\n \n"])
@pytest.mark.parametrize("column", [None, "text"])
def test_an_empty_file_is_said(tmp_path, name, text, column):
    path = write(tmp_path / name, text)
    if name == "a.txt" and column:
        message = "has no columns. Leave column 'text' out."
    elif name == "a.txt" and text:
        message = f"all its samples are empty. {GIVE_SOME}"
    else:
        message = f"there is nothing in it. {GIVE_SOME}"
    assert error(path, column=column) == f"{name}: {message}"


def test_a_table_without_rows_is_said(tmp_path):
    datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.csv", "text\n"), write(tmp_path / "a.json", "[]")):
        assert error(path, column="text") == f"{path.name}: there is nothing in it. {GIVE_SOME}"


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_missing_file_is_named_with_the_nearest(tmp_path, as_path):
    write(tmp_path / "calibration.txt", "w1")
    path = as_path(tmp_path / "calibratoin.txt")
    assert error(path) == f"{path}: there is no such file. Did you mean 'calibration.txt'?"
    path = as_path(tmp_path / "no" / "such.jsonl")
    assert error(path) == f"{path}: there is no such file."
    assert error("nowhere.jsonl") == "nowhere.jsonl: there is no such file."
    assert error("./nowhere") == "nowhere: there is no such file."


@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("as_path", [str, Path])
def test_a_pipe_is_said_and_not_waited_for(tmp_path, name, as_path):
    os.mkfifo(tmp_path / name)
    path = as_path(tmp_path / name)
    assert error(path) == f"{path}: is a pipe, and no file. {FROM_A_FILE}"


def test_a_device_is_said(tmp_path):
    (tmp_path / "zeros.txt").symlink_to("/dev/zero")
    assert error(tmp_path / "zeros.txt") == f"{tmp_path / 'zeros.txt'}: is a device, and no file. {FROM_A_FILE}"


def test_a_file_that_cannot_be_opened_is_said(tmp_path):
    path = write(tmp_path / "a.txt", "w1") / "b.txt"
    assert error(path) == f"{path}: cannot be read (Not a directory). Check its path and its permissions."


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a", "a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x81", b"w1\x00w2", "wörter".encode("latin-1")])
def test_a_binary_file_is_said(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert (
        error(tmp_path / name) == f"{name}: is not text in UTF-8. Save it so, as .txt, .jsonl, .json, .csv or .parquet."
    )


def test_broken_json_is_said_with_its_line(tmp_path):
    assert (
        error(write(tmp_path / "a.jsonl", '{"text": "w1"}\n\n{"text": w2}\n'))
        == "a.jsonl:3: not JSON: Expecting value. Mend that line."
    )
    assert error(write(tmp_path / "a.json", '[\n{"text": "w1"},\n{"text" "w2"}]')) == (
        "a.json:3: not JSON: Expecting ':' delimiter. Mend that line."
    )
    assert (
        error(write(tmp_path / "b.json", '{"text": "w1"}\n{"text":\n'))
        == "b.json:2: not JSON: Expecting value. Mend that line."
    )
    assert error(write(tmp_path / "c.json", "3")) == "c.json: int is no list of samples. Write a list of texts."
    assert error(write(tmp_path / "d.jsonl", '{"text": "w1"}\n3\n'), num_samples=2) == (
        "d.jsonl: sample 2 is int, and others have columns. Give samples of one kind."
    )


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_that_is_too_much_for_its_reader_is_said(tmp_path, suffix):
    deep, long = write(tmp_path / f"a{suffix}", "[" * 100_000), write(tmp_path / f"b{suffix}", f"[[{'9' * 5000}]]")
    where = {".json": "", ".jsonl": ":1"}[suffix]
    assert error(deep).startswith(f"a{suffix}{where}: not JSON that can be read (maximum recursion depth exceeded")
    assert error(long).startswith(f"b{suffix}{where}: not JSON that can be read (Exceeds the limit")


def test_a_csv_field_that_is_too_long_is_said_with_its_line(tmp_path):
    path = write(tmp_path / "a.csv", "text\nw1\n" + "w" * 200_000 + "\n")
    assert error(path) == "a.csv:3: not CSV: field larger than field limit (131072). Write it as .jsonl."


def test_what_is_no_parquet_is_said(tmp_path):
    assert error(write(tmp_path / "a.parquet", "text, but long enough")).startswith("a.parquet: not Parquet (")


@pytest.mark.parametrize(
    ("module", "data"), [("pyarrow", "a.parquet"), ("datasets", "somebody/something"), ("datasets", "folder")]
)
def test_the_extra_that_is_missing_is_named(tmp_path, monkeypatch, module, data):
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    write_folder(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    assert error(data) == f"{data}: {module} would read it, and is missing. pip install 'scalewright[data]'."


# ---- folders and the hub ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """`datasets` neither asks the hub nor keeps files, and shows no progress."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    write(folder / "test.jsonl", json.dumps(ROWS[0]))
    return folder


@pytest.mark.usefixtures("no_hub")
def test_a_folder_of_files_is_a_dataset_with_splits(tmp_path):
    folder = write_folder(tmp_path / "stories")
    assert sorted(sequences(load(folder))) == sorted(THREE_IDS)
    assert sequences(load(str(folder), split="test")) == [THREE_IDS[0]]
    assert error(folder, split="trian") == (
        "stories: there is no split 'trian'. Did you mean 'train'? Splits: train, test."
    )


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("in_splits", [True, False])
def test_a_saved_dataset_is_loaded(tmp_path, in_splits):
    rows = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict(train=rows) if in_splits else rows).save_to_disk(tmp_path / "saved")
    assert sorted(sequences(load(tmp_path / "saved"))) == sorted(THREE_IDS)


@pytest.mark.usefixtures("no_hub")
def test_a_folder_that_is_no_dataset_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty" / "README.md", "w1")
    assert error(tmp_path / "empty") == (
        f"{tmp_path / 'empty'}: is a folder without data. Give a file: .txt, .jsonl, .json, .csv, .parquet."
    )
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "a.jsonl", "{")
    assert error(tmp_path / "broken").startswith(f"{tmp_path / 'broken'}: a folder whose data cannot be loaded (JSON")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("stories", ("stories",)), ("some-body/stories_1.0:raw-v1", ("some-body/stories_1.0", "raw-v1"))],
)
def test_any_other_name_is_loaded_from_the_hub(monkeypatch, name, arguments):
    calls = []

    def load_dataset(*args, **keywords):
        calls.append((args, keywords))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sorted(sequences(load(name, split="validation"))) == sorted(THREE_IDS)
    assert calls == [(arguments, {"split": "validation"})]
    assert error(name, column="txet").startswith(f"{name}: there is no column 'txet'. Did you mean 'text'?")


@pytest.mark.usefixtures("no_hub")
def test_a_name_that_cannot_be_loaded_is_said():
    assert error("nobody/nothing") == (
        "nobody/nothing: neither a file nor a dataset that can be loaded (Couldn't reach 'nobody/nothing' on the Hub "
        "(OfflineModeIsEnabled)). Check its name, or give a file."
    )


# ---- a real tokenizer ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories():
    if not (STORIES / "tokenizer.json").is_file():
        pytest.skip("the trained model stories260K does not lie beside the project")
    return AutoTokenizer.from_pretrained(STORIES)


@pytest.mark.real_model
def test_a_real_tokenizer_gives_back_the_text(stories):
    texts = ["Once upon a time, there was a little girl.", "The dog ran.\nIt was happy."]
    samples = load(texts, stories, vocab_size=512)
    assert sorted(stories.decode(each, skip_special_tokens=True).strip() for each in sequences(samples)) == sorted(
        texts
    )
    assert all(each[0] == stories.bos_token_id for each in sequences(samples))


@pytest.mark.real_model
def test_letters_that_are_spelled_in_bytes_are_outside_the_vocabulary(stories):
    assert load(["Once upon a time.\n" * 300], stories, num_samples=1).notes == []
    assert load(["漢字仮名 " * 300], stories, num_samples=1).notes == [
        "data: 92% of its tokens stand for text outside the vocabulary. Is it text that the model knows?"
    ]


@pytest.mark.real_model
def test_a_real_file_of_stories(stories, tmp_path):
    path = write(tmp_path / "a.txt", "<|endoftext|>\n".join(f"Tom had {i} apples.\nHe ate one." for i in range(40)))
    before = stories.backend_tokenizer.to_str()
    samples = load(path, stories, num_samples=30, max_seq_length=12, batch_size=7, vocab_size=512)
    assert [len(batch["input_ids"]) for batch in samples.batches] == [7, 7, 7, 7, 2]
    assert samples.notes == ["a.txt: " + FEW.format(360)]
    assert len({tuple(each[:3]) for each in sequences(samples)}) == 1  # no document begins with a new line
    assert stories.backend_tokenizer.to_str() == before


def test_a_csv_file_with_two_columns_of_one_name_is_refused(tmp_path):
    (tmp_path / "two.csv").write_text("text,text\nw1,w2\n")
    with pytest.raises(DataError, match=r"^two.csv: 2 of its columns are called 'text'. Rename them.$"):
        load_samples(tmp_path / "two.csv", DataOptions(), tokenizer=make_tokenizer)


def test_a_csv_file_whose_quotes_do_not_end_is_refused(tmp_path):
    (tmp_path / "open.csv").write_text('text\n"w1 w2\nw3\n')
    with pytest.raises(DataError, match=r"^open.csv:3: not CSV: unexpected end of data. Write it as .jsonl.$"):
        load_samples(tmp_path / "open.csv", DataOptions(), tokenizer=make_tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_split_of_a_file_that_has_none_is_refused(tmp_path, name):
    (tmp_path / name).write_text({".txt": "w1 w2", ".jsonl": '{"text": "w1"}', ".csv": "text\nw1\n"}[Path(name).suffix])
    with pytest.raises(DataError, match=rf"^{name}: has no splits. Leave split 'test' out.$"):
        load_samples(tmp_path / name, DataOptions(split="test"), tokenizer=make_tokenizer)


def test_splits_of_a_json_file_are_chosen_from(tmp_path):
    (tmp_path / "a.json").write_text('{"train": [{"text": "w1"}], "test": [{"text": "w2"}, {"text": "w3"}]}')
    assert load_samples(tmp_path / "a.json", DataOptions(split="test"), tokenizer=make_tokenizer).num_samples == 2
