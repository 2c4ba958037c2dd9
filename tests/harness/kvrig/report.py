"""Results of named checks."""


class Report:
    """PASS and FAIL lines, counted."""

    def __init__(self):
        self.rows = []

    def check(self, name, ok, detail):
        """Note one result."""
        self.rows.append({"name": name, "ok": bool(ok), "detail": str(detail)})
        print(f"{'PASS' if ok else 'FAIL'} {name}: {detail}", flush=True)

    def failed(self):
        """Number of checks that failed."""
        return sum(not row["ok"] for row in self.rows)
