"""Data: files -> token cache -> rows -> the micro-batches of each dp rank. Needs numpy, not torch.

A run uses `build.loader_from_plan(plan, dp_rank, start_step=k)` and `build.eval_loader_from_plan(plan, dp_rank)`;
`build.build_loader(DataOptions, LoaderOptions)` (both in options) is the same without a plan.

sources   paths of the YAML to files, files to records with their lines
fields    accounts of records' fields; token_records, conversations: what they say
tokenise  records to tokens (text, tokens, chat), faults collected; tokenizer, chat, chat_mask are its parts
cache     built once per content, tokenizer and template; store is its format
dataset   rows of the store: documents cut or samples fitted to seq_length
order, packing, balance, loader   arithmetic from rows to steps: pure functions of (seed, epoch, step) and lengths
"""
