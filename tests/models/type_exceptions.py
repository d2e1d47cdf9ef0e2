"""Model types that test_every_type.py treats in another way, by name, each with the reason."""

VERSION = "5.24"


# they are built and run, and take minutes
SLOW = ("dac", "pe_audio", "pe_audio_encoder", "uvdoc_backbone", "vits")

# sparsify refuses the model, in these words
REFUSED: dict[str, str] = {
    "bit": "nothing to prune in this BitForImageClassification: its forward does something else with the weight",
    "encodec": "nothing to prune",
    "ibert": "nothing to prune",
    "wavtokenizer_encoder": "nothing to prune",
}

# the batch does not reach some of their layers, which are excluded; separated by blanks
NOT_REACHED = """
    aria csm deepseek_vl deepseek_vl_hybrid depth_anything dpt exaone4_5 flava gemma3 glm_image granite_docling
    granite_docling_vision granite_speech granite_speech_plus higgs_audio_v2 hyperclovax_vision_v2 inkling2
    inkling2_loop janus kimi_k25 kosmos-2.5 led lighton_ocr llava llava_next llava_next_video llava_onevision
    longformer luke minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mistral_large4 mllama muse_glimmer phi4_multimodal
    prompt_depth_anything qwen2_audio qwen3_asr qwen3_omni_moe_thinker rf_detr sam3 sam3_lite_text shieldgemma2
    t5gemma2 trocr unlimited_ocr video_llama_3 video_llava vipllava vjepa2 voxtral wavlm
"""

# less than 98 % of the weights in the blocks are covered: the share, and what has no adapter
PARTLY: dict[str, str] = {
    "deepseek_v4": "0.91: DeepseekV4CSACompressor.position_bias, DeepseekV4HCACompressor.positio",
    "falcon_mamba": "0.88: FalconMambaMixer.A_log",
    "funnel": "0.88: FunnelRelMultiheadAttention.r_kernel, FunnelRelMultiheadAttention.r_r_",
    "glm5_next": "0.91: Glm5NextTextHyperConnection.fn, Glm5NextTextIndexer.index_kpool_compre",
    "glm5_next_text": "0.87: Glm5NextTextHyperConnection.fn, Glm5NextTextIndexer.index_kpool_compre",
    "hy_v4": "0.96: HYV4HyperConnection.fn, HYV4HyperHead.hc_fn",
    "hy_v4_vl": "0.97: HYV4VLHyperConnection.fn, HYV4VLHyperHead.hc_fn",
    "hy_v4_vl_text": "0.96: HYV4VLHyperConnection.fn, HYV4VLHyperHead.hc_fn",
    "inkling2": "0.90: Inkling2BlockAttentionResidual.query, Inkling2DynamicShortConvolution.",
    "inkling2_loop": "0.90: Inkling2LoopShortConvolution.conv1d, relative position biases",
    "inkling2_loop_text": "0.88: Inkling2LoopShortConvolution.conv1d, relative position biases",
    "inkling2_text": "0.88: Inkling2BlockAttentionResidual.query, Inkling2DynamicShortConvolution.",
    "inkling_mm_model": "0.93: InklingRelativeLogits.proj",
    "inkling_text": "0.93: InklingRelativeLogits.proj",
    "jamba": "0.96: JambaMambaMixer.A_log",
    "mamba": "0.88: MambaMixer.A_log",
    "recurrent_gemma": "0.92: RecurrentGemmaRglru.input_gate_bias, RecurrentGemmaRglru.input_gate_we",
    "sam3": "0.97: ConvTranspose2d.weight, Sam3ViTEmbeddings.position_embeddings",
    "sam3_lite_text": "0.97: ConvTranspose2d.weight, Sam3LiteTextRepMixer.layer_scale, Sam3LiteText",
    "sam3_vision_model": "0.92: ConvTranspose2d.weight, Sam3ViTEmbeddings.position_embeddings",
    "xlnet": "0.44: XLNetModel.mask_emb, XLNetRelativeAttention.k, XLNetRelativeAttention.",
}

# calibrated through the whole model
WHOLE = {"squeezebert": "it calls the forward of its blocks past their hooks"}
