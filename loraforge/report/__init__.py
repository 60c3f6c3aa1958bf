"""What is told of a compression: numbers by adapter, one JSON object, and a page of HTML. No torch."""

from loraforge.report.page import report_page, write_report

__all__ = ["report_page", "write_report"]
