"""Kernels under compute-sanitizer: every kernel has a case, every case runs, reports are read."""

import re

import pytest
import torch

from benchmarks import sanitize, sanitize_cpu
from benchmarks.sanitize_cases import CASES
from openv41.ops import kernels as mode
from tests.meta.test_kernels import kernels


def test_every_kernel_has_a_case():
    named = {op for case in CASES for op in re.split(r"[ :]", case)}
    missing = kernels().keys() - named
    assert not missing, f"benchmarks/sanitize_cases.py has no case of {sorted(missing)}"


@pytest.mark.parametrize("name", CASES)
def test_cases_run_on_the_references(name):
    with mode("reference"):
        CASES[name](torch.Generator().manual_seed(1))


def test_a_process_says_where_cases_begin_and_end(capsys):
    assert sanitize.run(["route", "hash_ngrams"], device="cpu") == 0
    said = capsys.readouterr().out
    assert said == "begin route\nend route\nbegin hash_ngrams\nend hash_ngrams\n"


SAID = """========= COMPUTE-SANITIZER
begin one
end one
begin two: more
========= Invalid __global__ read of size 4 bytes
=========     at kernel+0x10 in source.cu:7
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ write of size 4 bytes
=========     at kernel+0x20 in source.cu:8
end two: more
begin three
RuntimeError: of the case
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""


def test_reports_belong_to_the_case_that_ran():
    lines = list(sanitize.parsed(["one", "two: more", "three", "four"], SAID))
    assert [line["status"] for line in lines] == ["clean", "2 reports", "failed", "not run"]
    assert lines[1]["first"] == "Invalid __global__ read of size 4 bytes"
    assert "RuntimeError: of the case" in lines[2]["first"]


def test_what_fails_without_a_tool_runs_under_none(monkeypatch):
    def process(tool, names, numbers, options):
        asked.append((tool, list(names)))
        wrong = {"hash_ngrams": "failed"}
        return [
            {"tool": tool, "case": name, "status": wrong.get(name, "clean"), "first": ""}
            for name in names
        ]

    asked = []
    monkeypatch.setattr(sanitize, "_process", process)
    options = sanitize._options(["--tools", "memcheck", "--jobs", "2"])
    lines = list(sanitize.measured(["hash_ngrams", "lookup_ngrams", "route"], options))
    assert [(line["tool"], line["case"], line["status"]) for line in lines] == [
        ("none", "hash_ngrams", "failed"),
        ("memcheck", "route", "clean"),
        ("memcheck", "lookup_ngrams", "clean"),
    ]
    assert ("memcheck", ["route"]) in asked


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 1
    assert "not to be had" in capsys.readouterr().err


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(sanitize, "_under", lambda _: ["sh", "-c", "echo begin route; sleep 60"])
    options = sanitize._options(["--seconds", "0.5"])
    (line,) = sanitize._process("memcheck", ["route"], [6], options)
    assert line["status"] == "failed"
    assert "time limit" in line["first"]


def test_the_table_has_a_column_for_each_tool(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize, "RESULTS", tmp_path)
    assert sanitize.table() == [("",), ("not run yet",)]
    lines = [
        {"tool": "memcheck", "case": "route", "status": "clean"},
        {"tool": "racecheck", "case": "route", "status": "2 reports"},
    ]
    sanitize.record(sanitize.NAME, lines, about={}, folder=tmp_path)
    assert sanitize.table() == [("case", "memcheck", "racecheck"), ("route", "clean", "2 reports")]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("..\n2 passed in 3 s\n", "clean"),
        ("SUMMARY: ThreadSanitizer: data race\n2 passed in 3 s\n", "1 reports"),
        ("1 passed, 2 errors in 3 s\n", "failed"),
        ("Segmentation fault\n", "failed"),
    ],
)
def test_what_sanitizers_of_the_compiler_say(said, status):
    assert sanitize_cpu.parsed(said)["status"] == status


def test_the_compiler_of_a_test_is_another(tmp_path, monkeypatch):
    """A test file that only shows which compiler it finds, and that nothing is preloaded."""
    file = tmp_path / "test_found.py"
    file.write_text(
        "import os, shutil, subprocess\n"
        "def test_found():\n"
        "    assert 'LD_PRELOAD' not in os.environ\n"
        "    said = subprocess.check_output([shutil.which('g++'), 'x'])\n"
        "    assert said == b'-g -fsanitize=y x\\n'\n"
    )
    (tmp_path / "bin").mkdir()
    said = sanitize_cpu._tested(
        file, tmp_path / "bin", sanitize_cpu.COMPILER.format("echo", "y"), ""
    )
    assert sanitize_cpu.parsed(said)["status"] == "clean", said
