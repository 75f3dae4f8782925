"""One plugin for each way in which a third party can break its hooks."""
