"""Tables: rows of labeled data from any kind of file, with the column roles that tasks use.

table = open_table("train.tsv", TableSettings(columns={"text_a": "review"}))
table[0]        # {"text_a": "a fine film", "label": "1"}
table.where(0)  # "train.tsv:2"
"""

from palm_ds.data.reader.options import ROLES, ColumnKey, TableSettings
from palm_ds.data.reader.table import Table, open_table, read_rows

__all__ = ["ROLES", "ColumnKey", "Table", "TableSettings", "open_table", "read_rows"]
