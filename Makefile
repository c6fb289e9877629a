# make setup && make test. Needs python3 >= 3.11, pip and make; everything else is put into this folder.
# PYTHON=python3.12 make test   uses another interpreter; the environment is made anew when it changes.

PYTHON ?= python3
WORKERS ?= 5
UV ?= $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
SHELL := /bin/sh

VERSION := $(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
READY := .venv/.ready-$(VERSION)
RUN := .venv/bin/python
RECENT := $(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Python 3.11 or newer is needed, this is " + sys.version)'

# uv does not read pip's settings: a machine that reaches its packages through them reaches them here too.
export UV_PYTHON_DOWNLOADS := never
export UV_NO_PROGRESS := 1
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_EXTRA_INDEX_URL
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif

.PHONY: setup demo test soak lint bench requirements peers upstreams console lock clean fleet

setup: $(READY)

.tools/bin/uv:
	@$(RECENT)
	PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(PYTHON) -m pip install -q --upgrade --target .tools "uv>=0.13,<0.14"

# The old environment is kept when only the lock changed, and replaced when the interpreter did.
$(READY): requirements.lock pyproject.toml | $(filter .tools/bin/uv,$(UV))
	@$(RECENT)
	@test -e $@ || rm -rf .venv
	@$(UV) venv -q --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" .venv
	@$(UV) pip sync -q --python $(RUN) --require-hashes requirements.lock
	@$(UV) pip install -q --python $(RUN) --no-deps --no-build-isolation -e .
	@touch $@

# The example server and a gateway, with their consoles, until Ctrl-C. SAMPLE=1: with some calls; DEMO_SECONDS=60: for that long.
demo: setup
	@SAMPLE="$(SAMPLE)" DEMO_SECONDS="$(DEMO_SECONDS)" $(RUN) examples/demo.py

# Redis, PostgreSQL, three replicas behind nginx, load, and one replica killed. SECONDS=60: for that long.
fleet: setup peers
	@SECONDS="$(or $(SECONDS),10)" $(RUN) examples/fleet/run.py

# Most of its time a test waits, for a clock, a process or a browser: five share two cores well. The order is that of
# conftest.py.
test: setup peers
	$(RUN) -m pytest -q -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What `make test` does a few times, as often as docs/reliability.md says; that has the figures of the last run. And the
# tests of what is promised within a time, which decides only here: on a machine that does nothing else.
TIMED := transports/test_supervisor transports/test_stdio transports/test_load client/test_faults \
	http1/test_connection http1/test_server http1/test_prefork
# And the floods and races of resources at their full size.
FLOODS := protocol/test_resources guards/test_resource_attacks
# And the stores: longer plays against their model, a cut at every byte.
STORES := stores/test_stores stores/test_redis
# And the gateway: all pairs of revisions on all pairs of transports, the official suite on older wires, faults.
GATEWAY := gateway/test_matrix gateway/test_faults gateway/test_hostile gateway/test_isolation \
	interop/test_conformance_gateway
soak: setup peers
	HANDRAIL_SOAK=1 $(RUN) -m pytest -q -rsP --show-capture=stdout tests/audit/test_faults.py tests/fleet/test_faults.py tests/audit/test_postgres.py \
		tests/guards/test_fire.py \
		$(TIMED:%=tests/%.py) $(FLOODS:%=tests/%.py) $(STORES:%=tests/%.py) \
		$(GATEWAY:%=tests/%.py)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: setup peers
	@UV="$(UV)" PYTHON="$(RUN)" sh tests/peers/install.sh bench
	$(RUN) benchmarks/run.py

requirements: setup
	@$(RUN) tools/requirements.py

# The other implementations that the tests talk to. Without them their tests are skipped, with the reason.
peers: setup
	@UV="$(UV)" PYTHON="$(RUN)" sh tests/peers/install.sh

# Other people's servers, all of them behind one gateway. `make test` has the few that are soon installed.
upstreams: setup
	@UV="$(UV)" PYTHON="$(RUN)" sh tests/peers/install.sh upstreams
	HANDRAIL_UPSTREAMS=all HANDRAIL_REQUIRE_PEERS=1 $(RUN) -m pytest -q -rs tests/interop/test_gateway_upstreams.py

# The page of the console. Its built files are in the repository: only who changes web/ needs Node (20.19 or newer).
console:
	npm ci --prefix web --no-fund --no-audit
	npm run --prefix web build

lock: | $(filter .tools/bin/uv,$(UV))
	$(UV) lock -q --upgrade
	@echo "# What tests and lint need, with hashes. Made by \`make lock\` from pyproject.toml." > requirements.lock
	$(UV) export -q --no-emit-project --no-header --no-annotate --group dev --extra http --extra auth --extra fleet >> requirements.lock
	for peer in mcp1 mcp2 fastmcp mcp-proxy $$(cd tests/peers && ls upstreams/*.txt | sed 's/\.txt$$//'); do \
		sed -n 's/^# peer: //p' tests/peers/$$peer.txt > .tools/peer.in; \
		{ sed -n '/^# /p' tests/peers/$$peer.txt; $(UV) pip compile -q --universal --python-version 3.11 --upgrade \
			--generate-hashes --no-header --no-annotate .tools/peer.in; } > .tools/peer.txt && \
		mv .tools/peer.txt tests/peers/$$peer.txt || exit 1; \
	done

clean:
	rm -rf .venv .tools .peers .requirements.json uv.lock build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
