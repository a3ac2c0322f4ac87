"""The weight registry: named weight sets with one writer, versions, manifests and receipts."""
