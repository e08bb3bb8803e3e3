# Each target sets up .venv on its own when needed; a second run installs nothing.
.PHONY: demo test kernels transfer lowest setup

# Without compiled modules, each of the hundreds of processes that tests start takes 4 s more of a core.
unexport PYTHONDONTWRITEBYTECODE

setup:
	@python3 scripts/setup.py

demo: setup
	@.venv/bin/kvant demo

test: setup
	@.venv/bin/python scripts/test.py

kernels: setup
	@.venv/bin/python scripts/test_kernels.py

transfer: setup
	@.venv/bin/python scripts/test_transfer.py

lowest: setup
	@scripts/test_lowest.sh
