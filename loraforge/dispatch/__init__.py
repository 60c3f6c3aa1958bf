"""Which kernels run where, as data: tables by device, made by the tuner, frozen by hash (paper, section 5)."""

from loraforge.dispatch.table import Entry, Table, choose, load_steps, load_table, steps_path, table_path

__all__ = ["Entry", "Table", "choose", "load_steps", "load_table", "steps_path", "table_path"]
