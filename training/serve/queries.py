"""The token ids of a query in OpenRLHF's form: a prompt and its response as one text, special tokens spelt out."""

from training.data.tokens import TextEncoder


def query_ids(encoder: TextEncoder, text: str) -> list[int]:
    """The ids that read as this text, and one EOS behind them, as OpenRLHF's own server puts there.

    Tokenizers of the SentencePiece kind write a space between BOS and the text, and read it as one more token: where
    the ids without that token read as this text, too, they are the ones that it was written from.
    """
    tokenizer, bos = encoder.tokenizer, encoder.spelt_bos(text)
    ids = encoder.prompt(text)
    if bos and text[len(bos) :].startswith(" "):
        without = encoder.prompt(text[len(bos) + 1 :])
        ids = without if tokenizer.decode(without) == text else ids
    while ids and ids[-1] in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        ids = ids[:-1]
    return encoder.ended(ids)
