# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Python keeps what it compiled, whatever the shell says: without it pytest rewrites every assert again at each start.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo poc test test-slow test-all nightly test-numeric docs pictures golden towers mutants lint bench lock release sbom clean

# Nothing is installed whose SHA-256 is not in a lock, and nothing is resolved. uv does it in seconds where pip takes
# minutes; pip fetches uv itself, and does all of it where uv cannot (no wheel for this machine, a package mirror that
# only pip knows).
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
LOCKED := install --no-deps --require-hashes
fetch = $(BIN)/uv pip $(LOCKED) --quiet --python $(BIN)/python $(1) || $(PIP) $(LOCKED) $(1)

# What a site or a demo runs with: wheels alone; with them setuptools, by which fedvlp itself is made, of which nothing
# is fetched.
$(VENV)/ready: pyproject.toml studies/pyproject.toml provisioning/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' constraints.txt >$(VENV)/uv.txt
	$(PIP) $(LOCKED) --only-binary :all: -r $(VENV)/uv.txt || echo "no uv here: pip installs, which takes minutes longer"
	$(call fetch,--only-binary :all: -r provisioning/requirements.txt)
	$(PIP) install --no-deps --no-build-isolation -e . -e studies # the latter: commands of a clone alone
	$(PIP) uninstall --yes rfc3987-syntax lark # jsonschema would compile their grammar in every process with MONAI
	touch $@

# The tools of development beside it.
$(VENV)/tools: $(VENV)/ready constraints.txt
	$(call fetch,--no-build-isolation -r constraints.txt)
	$(PIP) uninstall --yes rfc3987-syntax lark
	touch $@

# The main job in FLARE's simulator, and its report; then each site alone and FedAvg on the same terms, and what the three
# reach. Two rounds of the preset's six: as many as show what training together is for.
SETTINGS = --set rounds.rounds=2
demo: $(VENV)/ready
	PATH="$(abspath $(BIN)):$$PATH" poc/demo.sh $(SETTINGS)

# The main job, smaller, through a server and three sites with real certificates on this machine; nothing stays running.
poc: $(VENV)/ready
	PATH="$(abspath $(BIN)):$$PATH" poc/run.sh

# Everything that is fast, and one run of real FLARE processes.
test: $(VENV)/tools
	$(BIN)/python -m pytest -n 2 -m "not slow"

# The rooms that compute, as a processor without AVX-512 and AVX2 computes: what a tolerance hides shows here.
NUMERIC := $(addprefix tests/,core training methods objectives models evaluation federation)
HELD_DOWN := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE
test-numeric: $(VENV)/tools
	$(HELD_DOWN) $(BIN)/python -m pytest -n 2 -m "not slow" $(NUMERIC) tests/deploy/test_envelope.py

# The rest: simulator, provisioned and POC runs, several processes per site, another device. Four at a time on two cores:
# half of their time they wait for each other.
test-slow: $(VENV)/tools
	$(BIN)/python -m pytest -n 4 -m "slow and not nightly"

# Both in one go, the slow ones first: fast tests then fill the time that the slow ones wait.
test-all: $(VENV)/tools
	$(BIN)/python -m pytest -n 5 -m "not nightly"

# What takes too long for every commit: a thousand schedules, learning bands, every method on another device, each in
# every place and interrupted; the fast tests under other settings of a machine, in an order of the day; the mutants.
ORDER ?= $(shell date +%F)
# Whether German is installed; else it is made in build/, of what Debian's package locales brings.
GERMAN := locale -a | grep -qix 'de_DE\.utf-\?8'
LOCALES := $(abspath build/locales)
nightly: $(VENV)/tools
	$(BIN)/python -m pytest -n 4 -m slow
	$(GERMAN) || { mkdir -p $(LOCALES) && localedef -i de_DE -f UTF-8 $(LOCALES)/de_DE.UTF-8; }
	umask 077 && { $(GERMAN) || export LOCPATH=$(LOCALES); } && LOCALE=de_DE.UTF-8 LC_ALL=de_DE.UTF-8 TZ=Asia/Kolkata RANDOM_ORDER=$(ORDER) $(BIN)/python -m pytest -n 2 -m "not slow"
	REQUIRE='no Python' $(BIN)/python -m pytest tests/test_python_versions.py
	LOCALE=C LC_ALL=C RANDOM_ORDER=$(ORDER) $(BIN)/python -m pytest -n 2 -m "not slow"
	$(MAKE) mutants

# The pictures of README and docs, from two runs of a minute.
pictures: $(VENV)/tools
	$(BIN)/fedvlp simulate feddra --sites 2 --set data.size=800 --set rounds.rounds=2 --set method.local_steps=8 --runs build/pictures
	$(BIN)/fedvlp simulate fedavg --like build/pictures/feddra/001 --runs build/pictures
	$(BIN)/fedvlp compare build/pictures/fedavg/001 build/pictures/feddra/001 --html build/pictures/compare.html
	$(BIN)/python studies/programs/pictures.py build/pictures/feddra/001 build/pictures/compare.html

# Draws the picture of the rooms and writes the page of FedDRA anew, then builds the site: open build/docs/index.html.
# A warning is an error; mkdocs does not count warnings when it is told to be quiet. The notebooks are run, for minutes,
# where they or the package have changed since; NOTEBOOKS= leaves that out.
NOTEBOOKS ?= run
docs: $(VENV)/tools
	PYTHONPATH=tests $(BIN)/python -m support.picture
	PYTHONPATH=tests $(BIN)/python -m support.feddra_page
	PYTHONPATH=tests $(BIN)/python -m support.known
	NO_MKDOCS_2_WARNING=1 NOTEBOOKS=$(NOTEBOOKS) $(BIN)/python -m mkdocs build --strict

# Runs every committed preset shortly, says which figures moved, and rewrites those golden files; the commit says why.
golden: $(VENV)/tools
	$(BIN)/python tests/support/golden.py

# Trains the encoders that ship with fedvlp again, about five minutes of one thread, and says whether they are the same.
towers: $(VENV)/ready
	rm -rf build/towers
	$(BIN)/fedvlp simulate tiny-pool --runs build/towers
	$(BIN)/python studies/programs/towers.py build/towers/tiny-pool/001 build/towers/encoders

# Changes guards, losses, metrics and aggregation one place at a time; what no test notices is a gap. MUTANTS are names as
# mutmut has them, by default one of each function, another one every day of the month; "fedvlp.core.codec.*" is a module.
MUTANTS ?= *__mutmut_$(shell date +%-d)
mutants: $(VENV)/tools
	mkdir -p build/mutants/mutants
	ln -sfn ../../pyproject.toml ../../custom/fedvlp build/mutants && ln -sfn $(addprefix ../../../,tests provisioning jobs studies) build/mutants/mutants
	cd build/mutants && PYTHONHASHSEED=0 $(abspath $(BIN))/mutmut run --max-children $(or $(WORKERS),2) '$(MUTANTS)'
	cd build/mutants && $(abspath $(BIN))/mutmut results | sed -n 's/: survived$$//p' | xargs -n 1 $(abspath $(BIN))/mutmut show

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Resolves pyproject.toml and writes both locks anew: provisioning/requirements.txt, what a site or a server installs
# (wheels alone), and constraints.txt, that and the tools of development. Versions stay where they still fit; UPGRADE=1
# takes the newest. INDEX is the one index that is asked.
INDEX ?= https://pypi.org/simple
# gradio asks for pillow below 13; tests/report/explore run with what is locked here.
PILLOW = pillow>=10,<14
COMPILE = $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.10 --generate-hashes --no-annotate \
	--default-index $(INDEX) --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade) pyproject.toml
lock: $(VENV)/tools
	$(COMPILE) --extra dicom --extra privacy --extra he --extra ocr --no-build -o provisioning/requirements.txt
	echo "$(PILLOW)" | $(COMPILE) --extra dev -c provisioning/requirements.txt --override /dev/stdin -o constraints.txt

# What the consortium gives to its members, and provisioning signs (fedvlp.flare.SignedSoftware): the wheel, the lock of
# what it needs, a list of all that (CycloneDX), and their SHA-256. Built beside the tree, of its files alone.
RELEASE ?= build/release
release: $(VENV)/tools
	rm -rf $(RELEASE) build/source && mkdir -p $(RELEASE) build/source/custom
	cp -r pyproject.toml README.md LICENSE build/source && cp -r custom/fedvlp build/source/custom
	chmod -R u=rwX,go=rX build/source # modes are in a wheel, and must not be those of this shell's umask
	umask 022 && SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-315532800} $(PIP) wheel --no-deps --no-index --no-build-isolation -w $(RELEASE) ./build/source
	cp provisioning/requirements.txt $(RELEASE)
	$(BIN)/python -W ignore -m cyclonedx_py requirements $(VALIDATE) --pyproject pyproject.toml --output-reproducible -o $(RELEASE)/sbom.json provisioning/requirements.txt
	cd $(RELEASE) && sha256sum *.whl requirements.txt sbom.json >SHA256SUMS
	rm -rf build/source

# The list (CycloneDX) of what is installed in an environment, with licences; that of a site: ENVIRONMENT=/opt/fedvlp
ENVIRONMENT ?= $(VENV)
sbom: $(VENV)/tools
	mkdir -p build
	$(BIN)/python -W ignore -m cyclonedx_py environment $(VALIDATE) --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(ENVIRONMENT)/bin/python

bench: $(VENV)/tools
	for program in orchestration aggregation ablation start dro_weights retrieval neighbours distortion training pipeline creamfl_teachers sampled_contrast car_mfl bytes server_memory encryption privacy poisoned; do $(BIN)/python studies/programs/$$program.py || exit 1; done

clean:
	rm -rf build runs $(VENV)
