"""Model types that test_every_type.py treats in another way, by name, each with the reason."""

VERSION = "5.24"


def _reasons(names: dict[str, str]) -> dict[str, str]:
    """Reason -> names, separated by blanks: turned around."""
    return {name: reason for reason, those in names.items() for name in those.split()}


# no tiny model is built in the common way
NOT_BUILT = _reasons(
    {
        "more than 30 million parameters": """
            align blt dots3_note_text efficientnet neucodec perceiver qwen2_5_omni vibevoice
            vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
            vibevoice_asr xcodec2
        """,
        "its config or class does not take the small values": """
            apertus1p5 chameleon cohere_compass cohere_compass_text cvt d_fine dbrx deepseek_ocr2 depth_pro
            diffusion_gemma dory dots1 dots3_note efficientloftr emu3 ernie4_5_vl_moe esm fun_asr_nano gemma4_assistant
            gemma4_unified_assistant gpt_neo granite4_vision lw_detr lw_detr_vit mamba2 maskformer molmo2
            moonshine_streaming muse_spark muse_spark_audio nemotron nemotron_h_omni pp_ocrv5_server_det
            pp_ocrv6_medium_det qwen3_omni_moe qwen4_exp qwen4_exp_text t5gemma2_encoder upernet vitmatte
            voxtral_realtime_text zamba
        """,
        "needs timm": "conditional_detr dab-detr deformable_detr detr omdet-turbo table-transformer timm_backbone",
        "needs natten": "dinat",
        "needs PIL": """
            edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder pe_video
            pe_video_encoder perception_lm timm_wrapper
        """,
        "needs scipy": "eomt eomt_dinov3 inkling_mm_model videomt",
        "no auto mapping has a model for it": "evolla",
        "needs torchaudio": "higgs_audio_v2_tokenizer",
        "needs detectron2": "layoutlmv2",
    }
)

# built, and not run
NOT_RUN = _reasons(
    {
        "no batch of those that are tried runs through it": """
            audio-spectrogram-transformer autoformer blip-2 blip_2_qformer chmv2 clap clvp colqwen2 decision_transformer
            deepseek_v2 deimv2 donut-swin exaone4_5_vision fastspeech2_conformer_with_hifigan fun_asr_nano_encoder
            gemma3n_audio gemma4_vision granite_speech5_ctc granite_speech5_encoder grounding-dino hgnet_v2 hunyuan_vl
            hunyuan_vl_text idefics informer inkling2_vision instructblip instructblipvideo jev kimi_k25_vision kosmos-2
            kyutai_speech_to_text lightglue lilt llama4 mask2former minicpm_ocr_vision minicpmv4_7_vision
            mm-grounding-dino moonshine muse_glimmer_assistant muse_glimmer_vision muse_spark_vision musicgen
            musicgen_melody nemo_speechlm nemotron_h oneformer paddleocr_vl pi0 pix2struct pp_doclayout_v2
            pp_doclayout_v3 pp_doclayout_v4 pp_ocrv5_mobile_det pp_ocrv5_server_rec pp_ocrv6_small_det
            qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision qwen2_vl qwen2_vl_text qwen3_asr_encoder
            rt_detr rt_detr_v2 sam2 sam2_hiera_det_model sam2_vision_model sam3_tracker seggpt slanet splinter superglue
            superpoint swin textnet time_series_transformer timesfm timesfm2_5 tipsv2_dpt tvp uvdoc video_llama_3_vision
            voxtral_realtime xcodec xmod zoedepth
        """,
        "the main input is not one that the harness makes": """
            bark edgetam_video glm_image_vqmodel mimi_decoder pocket_tts_audio_tokenizer_decoder sam2_video
            sam3_tracker_video sam3_video
        """,
        "takes minutes": "dac pe_audio pe_audio_encoder uvdoc_backbone vits",
    }
)

# sparsify refuses the model, in these words
REFUSED: dict[str, str] = {
    "bit": "nothing to prune in this BitForImageClassification: its forward does something else with the weight",
    "encodec": "nothing to prune",
    "ibert": "nothing to prune",
    "wavtokenizer_encoder": "nothing to prune",
}

NOT_REACHED = _reasons(
    {
        "the batch does not reach some of its layers, which are excluded": """
            aria csm deepseek_vl deepseek_vl_hybrid depth_anything dpt exaone4_5 flava gemma3 glm_image granite_docling
            granite_docling_vision granite_speech granite_speech_plus higgs_audio_v2 hyperclovax_vision_v2 inkling2
            inkling2_loop janus kimi_k25 kosmos-2.5 led lighton_ocr llava llava_next llava_next_video llava_onevision
            longformer luke minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mistral_large4 mllama muse_glimmer
            phi4_multimodal prompt_depth_anything qwen2_audio qwen3_asr qwen3_omni_moe_thinker rf_detr sam3
            sam3_lite_text shieldgemma2 t5gemma2 trocr unlimited_ocr video_llama_3 video_llava vipllava vjepa2 voxtral
            wavlm
        """
    }
)

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
