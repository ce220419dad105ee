"""Score a file of predictions against a file of what is right: no model is needed.

    python launch/evaluate.py --kind classification --gold dev.tsv --predictions DIR/sst2.tsv
    python launch/evaluate.py --kind reading --style squad2 --gold dev-v2.0.json \\
        --predictions DIR/squad.predictions.json
    python launch/evaluate.py --kind tagging --gold FILE --predictions FILE     # one CoNLL file:
        # its last column is predicted, the one before it is right

Predictions may be launch/predict.py's lines or tables, SQuAD's object of answers, CoNLL, or one a
line in the order of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from palm_ds.errors import exit_on_user_error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kind",
        required=True,
        help="classification, multi_label, regression, matching, multiple_choice, tagging, reading "
        "or ranking",
    )
    parser.add_argument("--gold", nargs="+", required=True, metavar="FILE", help="with labels")
    parser.add_argument("--predictions", required=True, metavar="FILE")
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="ROLE=NAME", help="of the gold file"
    )
    parser.add_argument(
        "--format", default="auto", help="of the gold file; by default, by its name"
    )
    parser.add_argument(
        "--no_header", action="store_true", help="the gold file's columns are numbers, from 0"
    )
    parser.add_argument("--positive", default="", help="classification: the class F1 is of")
    parser.add_argument("--separator", default=",", help="multi_label: between classes (,)")
    parser.add_argument("--scheme", default="BIO", help="tagging: BIO, IOB1, ...; none: no chunks")
    parser.add_argument("--style", default="squad1", help="reading: squad1, squad2 or cmrc")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores here as well")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with exit_on_user_error():
        from palm_ds.judge import Rules, judge
        from palm_ds.reader import TableSettings
        from palm_ds.reader.options import columns_of

        rules = Rules(
            kind=args.kind,
            positive=args.positive,
            separator=args.separator,
            scheme=args.scheme,
            style=args.style,
        )
        read = TableSettings(
            columns=columns_of(args.columns),
            format=args.format,
            header=not args.no_header,
            lost_answers="keep",
        )
        scores = judge(args.gold, args.predictions, rules, read)
        if args.json:
            plain = {k: v if math.isfinite(v) else None for k, v in scores.items()}
            args.json.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        from rich.console import Console
        from rich.table import Table

        table = Table("metric", "score")
        for name, value in scores.items():
            table.add_row(name, f"{value:.4f}")
        Console(highlight=False).print(table)
        return 0
    return 2


if __name__ == "__main__":
    sys.exit(main())
