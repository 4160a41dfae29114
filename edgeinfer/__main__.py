"""Run `python -m edgeinfer` as the `edgeinfer` command."""

from __future__ import annotations

from edgeinfer.cli import main

raise SystemExit(main())
