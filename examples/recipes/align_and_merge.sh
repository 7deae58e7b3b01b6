#!/bin/sh
# Merge two checkpoints of one architecture with mergekit, after moving one as near to the other as it gets.
#   sh examples/recipes/align_and_merge.sh A B OUT
set -e
conserved align "$1" "$2" -o "$3.aligned"
cat > "$3.yaml" <<YAML
merge_method: linear
dtype: float32
models:
  - model: $1
    parameters: {weight: 0.5}
  - model: $3.aligned
    parameters: {weight: 0.5}
YAML
mergekit-yaml "$3.yaml" "$3" --no-write-model-card  # the card asks the hub
