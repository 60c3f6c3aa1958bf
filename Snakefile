# Bare `snakemake` works from the repository's root; everything is in workflow/.
include: "workflow/Snakefile"
