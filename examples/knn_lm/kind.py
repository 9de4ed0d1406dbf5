"""What memstore is told of the mechanism. Nothing is imported until a model of this kind is used."""

from memstore.readers.kinds import Kind

KNN_LM = Kind(
    name="kNN-LM",
    key="knn-lm",
    loader="examples.knn_lm.modeling:KNNLMForCausalLM.from_pretrained",
    reader="examples.knn_lm.reader:KNNLMReader",
    audit="",
)
