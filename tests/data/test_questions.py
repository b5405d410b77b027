"""Extractive question answering: reading, windows, answers and scores."""

import gzip
import json
import math
import random
import re

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from fastenc.data import train_tokenizer
from fastenc.data.questions import Answer, Question, question_windows, read_questions
from fastenc.tasks.answers import extract_answers
from fastenc.tasks.squad import best_threshold, exact_match, f1, squad_metrics
from fastenc.text.tokenizers import without_limits

CONTEXT = "Ada Lovelace wrote the first program in 1843 . " * 12 + "It computed Bernoulli numbers ."


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CONTEXT, "Who wrote what, and when?"] * 3, vocab_size=200)


def ask(text: str, id: str = "q") -> Question:
    return Question(id, "What did it compute ?", CONTEXT, [Answer(CONTEXT.index(text), text)])


# transformers 4.57's squad_metrics gives the same. Three questions of 2.0 have "." among their answers.
@pytest.mark.parametrize(
    ("version", "exact", "f1_score"), [("1.1", 86.21, 92.20), ("2.0", 78.74, 81.78)]
)
def test_published_predictions_get_the_scores_of_squads_scripts(data_dir, version, exact, f1_score):
    folder = data_dir / f"squad_v{version}_dev"
    questions = [
        question
        for name in ("train_articles", "eval_articles")
        for question in read_questions(folder / f"{name}.json.gz")
    ]
    with gzip.open(folder / "reference_predictions.json.gz") as file:
        metrics = squad_metrics(questions, json.load(file))
    assert round(metrics["exact"], 2) == exact
    assert round(metrics["f1"], 2) == f1_score


def test_scores_follow_the_definition():
    assert exact_match("The Black-Death!", "blackdeath") == 1
    assert f1("the big red dog", "a red dog barks") == pytest.approx(2 / 3)
    assert f1("", "") == 1 and f1("", "x") == 0
    questions = [ask("1843", "a"), Question("b", "Why ?", CONTEXT, [])]
    metrics = squad_metrics(questions, {"a": "in 1843", "b": "x"})
    assert metrics["f1"] == pytest.approx(100 * (2 / 3) / 2)
    assert metrics["no_answer_exact"] == 0
    assert metrics["has_answer_f1"] == pytest.approx(100 * 2 / 3)
    with pytest.raises(ValueError, match="no prediction for question 'b'"):
        squad_metrics(questions, {"a": "1843"})


def test_an_answer_without_words_is_left_out_as_by_squads_script():
    """evaluate-v2.0: ``[a['text'] for a in qa['answers'] if normalize_answer(a['text'])]``, else ``['']``."""
    answers = [Answer(CONTEXT.index(text), text) for text in ("1843", ".")]
    for of_question, prediction, expected in (
        (answers, "", 0),
        (answers, "The .", 0),
        (answers, "1843", 100),
        (answers[1:], "", 100),
    ):
        metrics = squad_metrics([Question("a", "When ?", CONTEXT, of_question)], {"a": prediction})
        assert metrics == {"exact": expected, "f1": expected}


@pytest.mark.parametrize("count,seeds", [(1, 4), (2, 20), (4, 50), (60, 1)])
def test_best_threshold_is_the_best_of_all_thresholds(count, seeds):
    for seed in range(seeds):
        draw = random.Random(seed)
        questions, predictions, scores = [], {}, {}
        for i in range(count):
            answerable = draw.random() < 0.5
            answers = [Answer(0, "Ada")] if answerable else []
            questions.append(Question(str(i), "?", CONTEXT, answers))
            predictions[str(i)] = draw.choice(["Ada", "Ada Lovelace", "Bob"])
            scores[str(i)] = round(draw.gauss(0 if answerable else 1, 1), 1)

        def score(threshold, questions=questions, predictions=predictions, scores=scores):
            chosen = {i: "" if scores[i] > threshold else text for i, text in predictions.items()}
            return squad_metrics(questions, chosen)["f1"]

        ours = score(best_threshold(questions, predictions, scores))
        assert ours == pytest.approx(max(map(score, [-9.0, *scores.values()])))


def test_best_threshold_answers_questions_of_equal_scores_together():
    """Leaving all unanswered makes two of three right, answering all one."""
    questions = [Question(id, "?", CONTEXT, []) for id in "bc"]
    questions = [Question("a", "?", CONTEXT, [Answer(0, "Ada")]), *questions]
    scores = dict.fromkeys("abc", 0.5)
    assert best_threshold(questions, dict.fromkeys("abc", "Ada"), scores) < 0.5


def test_best_threshold_lies_half_way_between_answered_and_unanswered():
    answered = [Question(id, "?", CONTEXT, [Answer(0, "Ada")]) for id in "ab"]
    questions = [*answered, Question("c", "?", CONTEXT, []), Question("d", "?", CONTEXT, [])]
    scores = {"a": -2.0, "b": -1.0, "c": 2.0, "d": 3.0}
    assert best_threshold(questions, dict.fromkeys("abcd", "Ada"), scores) == 0.5


def test_best_threshold_counts_an_empty_prediction_as_no_answer():
    """evaluate-v2.0's find_best_thresh: without an answer, only ``if preds[qid]`` makes it wrong."""
    questions = [Question("a", "?", CONTEXT, []), Question("b", "?", CONTEXT, [Answer(0, "Ada")])]
    predictions, scores = {"a": "", "b": "Ada"}, {"a": -1.0, "b": 1.0}
    threshold = best_threshold(questions, predictions, scores)
    chosen = {i: "" if scores[i] > threshold else text for i, text in predictions.items()}
    assert squad_metrics(questions, chosen)["f1"] == 100


def test_windows_hold_the_whole_context_and_the_answer(tokenizer):
    question = ask("Bernoulli numbers")
    windows = question_windows([question], tokenizer, max_length=48, stride=12)
    assert len(windows) > 3
    covered = set()
    for window in windows:
        assert len(window.input_ids) <= 48
        assert window.last - window.first + 1 == len(window.offsets) == len(window.central)
        assert all(t == 1 for t in window.token_type_ids[window.first : window.last + 1])
        covered |= set(window.offsets)
        if window.end:
            first, last = (window.offsets[i - window.first] for i in (window.start, window.end))
            assert CONTEXT[first[0] : last[1]] == "Bernoulli numbers"
    assert {start for start, _ in covered} == {
        start for start, _ in tokenizer.encode(CONTEXT, add_special_tokens=False).offsets
    }
    assert any(window.end for window in windows) and not windows[0].end
    # Every token is central in exactly one window.
    central = [o for w in windows for o, c in zip(w.offsets, w.central, strict=True) if c]
    assert sorted(central) == sorted(covered)
    # It is the window in which the nearer edge is farthest; of equals, the first.
    for offset in covered:
        edges = [
            min(w.offsets.index(offset), len(w.offsets) - 1 - w.offsets.index(offset))
            if offset in w.offsets
            else -1
            for w in windows
        ]
        window = windows[edges.index(max(edges))]
        assert window.central[window.offsets.index(offset)]


def test_windows_of_a_tokenizer_without_special_tokens(tokenizer):
    bare = without_limits(tokenizer)
    bare.post_processor = None
    question = ask("Bernoulli numbers")
    windows = question_windows([question], bare, max_length=48, stride=12)
    central = [o for w in windows for o, c in zip(w.offsets, w.central, strict=True) if c]
    assert central == bare.encode(CONTEXT).offsets and len(windows) > 3
    first, last = (windows[-1].offsets[i - windows[-1].first] for i in windows[-1][-2:])
    assert CONTEXT[first[0] : last[1]] == "Bernoulli numbers"


def test_windows_name_their_question_whatever_is_encoded_together(tokenizer, monkeypatch):
    texts = ("Ada", "first", "1843", "It", "numbers")
    questions = [ask(text, str(number)) for number, text in enumerate(texts)]
    monkeypatch.setattr("fastenc.data.questions.QUESTIONS_AT_ONCE", 2)
    together = question_windows(questions, tokenizer, max_length=48, stride=12)
    assert [w.question for w in together] == sorted(w.question for w in together)
    for number, question in enumerate(questions):
        alone = question_windows([question], tokenizer, max_length=48, stride=12)
        own = [w._replace(question=0) for w in together if w.question == number]
        assert own == alone and any(w.end for w in own)


def test_answer_cut_by_a_window_is_not_in_it(tokenizer):
    text = "first program in 1843"
    answers = [Answer(place.start(), text) for place in re.finditer(text, CONTEXT)]
    questions = [Question(str(a.start), "Who ?", CONTEXT, [a]) for a in answers]
    cut = 0
    for window in question_windows(questions, tokenizer, max_length=32, stride=4):
        begin, end = answers[window.question].start, answers[window.question].start + len(text)
        left, right = window.offsets[0][0], window.offsets[-1][1]
        if left <= begin and end <= right:
            first, last = (window.offsets[i - window.first] for i in (window.start, window.end))
            assert (first[0], last[1]) == (begin, end)
        else:
            cut += left < end and begin < right
            assert window.start == window.end == 0
    assert cut > 1, "some windows cut an answer"


def brute_force(window, scores, longest):
    best = (float("-inf"), None)
    for i, (begin, _) in enumerate(window.offsets):
        for j in range(i, min(i + longest, len(window.offsets))):
            score = float(scores[window.first + i, 0] + scores[window.first + j, 1])
            if window.central[i] and score > best[0]:
                best = (score, CONTEXT[begin : window.offsets[j][1]])
    return best


def test_best_answer_is_that_of_an_exhaustive_search(tokenizer):
    torch.manual_seed(0)
    question = ask("Bernoulli numbers")
    windows = question_windows([question], tokenizer, max_length=40, stride=10)
    logits = [torch.randn(len(window.input_ids), 2) for window in windows]
    (prediction,) = extract_answers([question], windows, logits, max_answer_tokens=5)
    score, text = max(brute_force(w, s, 5) for w, s in zip(windows, logits, strict=True))
    nothing = min(float(s[0].sum()) for s in logits)
    assert prediction.text == text
    assert prediction.no_answer_score == pytest.approx(nothing - score, abs=1e-5)
    assert sum(candidate.probability for candidate in prediction.candidates) == pytest.approx(1)
    assert all(c.text == CONTEXT[c.start : c.end] for c in prediction.candidates)
    assert prediction.answer(None) == prediction.answer(prediction.no_answer_score) == text
    assert prediction.answer(prediction.no_answer_score - 0.1) == ""


def test_answers_have_no_space_around_them_where_tokens_have(tokenizer):
    byte_level = train_tokenizer([CONTEXT] * 3, vocab_size=400, model_type="bpe")
    template = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
    ids = [(name, byte_level.token_to_id(name)) for name in ("<s>", "</s>")]
    # As in ModernBERT's tokenizer.json, where no post-processor takes the spaces out of the offsets.
    byte_level.post_processor = TemplateProcessing(**template, special_tokens=ids)
    question = ask("Bernoulli numbers")
    (window,) = question_windows([question], byte_level, max_length=900, stride=10)
    assert any(CONTEXT[begin:end].startswith(" ") for begin, end in window.offsets)
    logits = torch.zeros(len(window.input_ids), 2)
    logits[window.start, 0] = 9
    logits[window.end, 1] = 9
    (prediction,) = extract_answers([question], [window], [logits])
    best = max(prediction.candidates, key=lambda candidate: candidate.score)
    assert prediction.text == best.text == "Bernoulli numbers"
    assert (best.start, best.end) == (CONTEXT.index("Bernoulli"), len(CONTEXT) - 2)
    assert all(c.text == CONTEXT[c.start : c.end] for c in prediction.candidates)


def test_an_answer_is_whole_whatever_characters_the_tokenizer_drops():
    """BERT's uncased tokenizer drops accents that are characters of their own, and joiners."""
    context = "She drank a cafe\u0301 noir\u200d in a cafe\u0301"
    tokenizer = train_tokenizer([context, "what did she drink"] * 3, vocab_size=80)
    first, last = context.index("cafe"), context.rindex("cafe")
    for begin, text in (
        (first, "cafe\u0301"),
        (first, "cafe\u0301 noir\u200d"),
        (last, "cafe\u0301"),
    ):
        question = Question("q", "What did she drink ?", context, [Answer(begin, text)])
        (window,) = question_windows([question], tokenizer, max_length=64, stride=4)
        assert window.end, text
        logits = torch.zeros(len(window.input_ids), 2)
        logits[window.start, 0] = logits[window.end, 1] = 9
        (prediction,) = extract_answers([question], [window], [logits])
        assert prediction.text == text.removesuffix("\u200d"), "the joiner belongs to no token"
        assert prediction.candidates[0].start == begin


def test_a_character_of_several_tokens_has_the_best_of_their_scores():
    context = "ab\U0001f600cd\U0001f600e"
    byte_level = train_tokenizer(["abcde"] * 9, vocab_size=270, model_type="bpe")
    question = Question("q", "abc", context, [])
    (window,) = question_windows([question], byte_level, max_length=64, stride=4)
    assert len({*window.offsets}) < len(window.offsets)
    logits = torch.randn(len(window.input_ids), 2)
    options = dict(n_best=1000, max_answer_tokens=50)
    (prediction,) = extract_answers([question], [window], [logits], **options)
    expected: dict = {}
    for first, (begin, _) in enumerate(window.offsets):
        for last, (_, end) in enumerate(window.offsets[first:], first):
            score = float(logits[window.first + first, 0] + logits[window.first + last, 1])
            expected[begin, end] = max(score, expected.get((begin, end), -math.inf))
    found = {(each.start, each.end): each.score for each in prediction.candidates if each.text}
    assert found == pytest.approx(expected)


def test_white_space_is_no_answer():
    context = "one \n\n\n two"
    byte_level = train_tokenizer([context] * 9, vocab_size=300, model_type="bpe")
    question = Question("q", "one ?", context, [])
    (window,) = question_windows([question], byte_level, max_length=64, stride=4)
    blank = [not context[begin:end].strip() for begin, end in window.offsets]
    assert any(blank)
    # The most likely first and last tokens are white space.
    logits = torch.randn(len(window.input_ids), 2)
    logits[window.first : window.last + 1] += 20 * torch.tensor(blank)[:, None]
    (prediction,) = extract_answers([question], [window], [logits])
    *spans, _ = sorted(prediction.candidates, key=lambda candidate: candidate.text == "")
    assert prediction.text.strip() and all(span.text.strip() for span in spans)
    places = [(span.start, span.end) for span in spans]
    assert len(set(places)) == len(places), "no candidate occurs twice"


def test_logits_in_half_precision_are_added_in_single_precision(tokenizer):
    question = ask("Bernoulli numbers")
    windows = question_windows([question], tokenizer, max_length=60, stride=10)
    logits = [torch.randn(len(window.input_ids), 2).bfloat16() for window in windows]
    for each in logits:
        each[0] = torch.tensor([1, 2**-8])  # their sum has more digits than bfloat16
    (half,) = extract_answers([question], windows, logits)
    (single,) = extract_answers([question], windows, [each.float() for each in logits])
    assert half == single


def squad_file(path, **changes):
    row = {
        "id": "q1",
        "question": "Who ?",
        "answers": [{"text": "Ada", "answer_start": 0}],
        **changes,
    }
    paragraphs = [{"context": "Ada wrote it .", "qas": [row]}]
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def test_table_of_questions_is_read_like_squads_json(tmp_path):
    row = {"id": "q1", "question": "Who ?", "context": "Ada wrote it ."}
    answers = {"text": ["Ada"], "answer_start": [0]}
    (tmp_path / "q.jsonl").write_text(json.dumps({**row, "answers": answers}))
    assert read_questions(tmp_path / "q.jsonl") == read_questions(squad_file(tmp_path / "q.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"answers": [{"text": "Bob", "answer_start": 0}]},
            "question 'q1': the answer 'Bob' must be in its context at character 0, got 'Ada' there",
        ),
        ({"answers": [{"text": "Ada", "answer_start": -3}]}, "must be in its context"),
        (
            {"answers": [{"text": "Ada", "answer_start": "0"}]},
            "question 'q1': an answer must be a text, and answer_start the number of its first character, got 'Ada' "
            "and '0'",
        ),
        ({"answers": [{"text": None, "answer_start": 0}]}, "got None and 0: correct them"),
        ({"question": " "}, "question 'q1': the question must be text"),
        ({"question": "Who \ud83d"}, r"question 'q1': texts must consist of whole characters"),
        ({"answers": None}, "is not SQuAD's JSON"),
    ],
)
def test_malformed_questions_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_questions(squad_file(tmp_path / "q.json", **changes))


def test_other_files_and_questions_without_room_are_errors(tmp_path, tokenizer):
    for content in ("[1", "[" * 100_000, "9" * 5000):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="is not SQuAD's JSON"):
            read_questions(tmp_path / "x.json")
    with pytest.raises(ValueError, match="is not a file"):
        read_questions(tmp_path / "missing.json")
    (tmp_path / "none.json").write_text('{"data": []}')
    with pytest.raises(
        ValueError, match=r"none.json holds no questions: give a file with at least"
    ):
        read_questions(tmp_path / "none.json")
    long = Question("long", "why " * 40, CONTEXT, [])
    with pytest.raises(ValueError, match=r"question 'long' has .* tokens and leaves"):
        question_windows([long], tokenizer, max_length=48, stride=12)
    invisible = Question("empty", "Who ?", "\u200d", [])
    with pytest.raises(
        ValueError, match=r"question 'empty' has a context without tokens, '.u200d'"
    ):
        question_windows([ask("Bernoulli numbers"), invisible], tokenizer, max_length=48, stride=12)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = squad_file(tmp_path / "q.json")
    expected = read_questions(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_questions(path) == expected


@pytest.mark.parametrize("keep", [0, 1, 5, 15, 40, 0.5, -9, -8, -1])
def test_a_cut_or_damaged_gzip_file_is_named(tmp_path, keep):
    """Cut in the header, in the content or in the checksum."""
    content = gzip.compress(squad_file(tmp_path / "whole.json").read_bytes())
    end = int(len(content) * keep) if isinstance(keep, float) else keep
    cut = tmp_path / "train.json.gz"
    cut.write_bytes(content[:end])
    with pytest.raises(ValueError, match=r"train.json.gz(: | is not SQuAD|.*damaged or not gzip)"):
        read_questions(cut)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 255
    cut.write_bytes(bytes(damaged))
    with pytest.raises(ValueError, match=r"train.json.gz"):
        read_questions(cut)


def test_a_malformed_question_of_a_table_is_named_by_its_line(tmp_path):
    row = {"id": "q1", "question": "Who ?", "context": "Ada wrote it ."}
    answers = [{"text": [text], "answer_start": [0]} for text in ("Ada", "Bob")]
    lines = [json.dumps({**row, "id": str(i), "answers": a}) for i, a in enumerate(answers)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        ValueError, match=r"q.jsonl, line 2: the answer 'Bob' must be in its context"
    ):
        read_questions(tmp_path / "q.jsonl")


def test_questions_to_be_answered_need_no_answers(tmp_path):
    row = {"id": "q1", "question": "Who ?", "context": "Ada wrote it ."}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    assert read_questions(tmp_path / "q.jsonl", answers=False) == [Question(*row.values(), [])]
    with pytest.raises(ValueError, match="there must be a column 'answers'"):
        read_questions(tmp_path / "q.jsonl")
