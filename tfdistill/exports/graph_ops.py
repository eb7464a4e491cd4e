"""Which TensorFlow operations a graph from elsewhere may hold, and why.

A list of what is allowed, not of what is forbidden: TensorFlow has well over a
thousand operations, and every list of the dangerous ones has had holes.
Left out, besides all that is not named here: files (ReadFile, WriteFile,
MatchingFiles, readers, summaries), printing (PrintV2 writes to any file),
Python (PyFunc, EagerPyFunc), debugging (DebugIdentityV2 opens sockets), data
sets, queues, barriers, collectives, remote calls, custom calls of compilers,
variables by name (VarHandleOp reaches other models' variables in the process),
and the loops of TensorFlow 1, made of Enter and NextIteration.
"""

# Tensors in, tensors out; no state, no names of files, no other process.
_ARITHMETIC = """
    Abs Acos Acosh Add AddN AddV2 All Angle Any ApproximateEqual ArgMax ArgMin
    Asin Asinh Atan Atan2 Atanh BatchMatMul BatchMatMulV2 BatchMatMulV3
    BesselI0e BesselI1e Bincount BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast
    Ceil CheckNumerics Cholesky ClipByValue Complex ComplexAbs Conj Cos Cosh
    Cross Cumprod Cumsum CumulativeLogsumexp DenseBincount Digamma Div DivNoNan
    Einsum Equal Erf Erfc Erfinv EuclideanNorm Exp Expm1 FFT FFT2D FFT3D Floor
    FloorDiv FloorMod Greater GreaterEqual IFFT IFFT2D IFFT3D IRFFT IRFFT2D
    Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan L2Loss LeftShift Less
    LessEqual Lgamma LinSpace Log Log1p LogicalAnd LogicalNot LogicalOr MatMul
    MatrixInverse MatrixSolve MatrixTriangularSolve Max Maximum Mean Min
    Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual Polygamma Pow Prod
    RFFT RFFT2D Range Real RealDiv Reciprocal RightShift Rint Round Rsqrt
    SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum SegmentSumV2 Sign
    Sin Sinh Sqrt Square SquaredDifference Sub Sum Tan TopK TopKV2 TruncateDiv
    TruncateMod UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
    UnsortedSegmentSum Xdivy Xlog1py Xlogy Zeta
"""
_LAYERS = """
    AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D BatchToSpace
    BatchToSpaceND BiasAdd BiasAddV1 Conv Conv2D Conv2DBackpropInput Conv3D
    Conv3DBackpropInputV2 CropAndResize DepthToSpace DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput Dilation2D Elu FusedBatchNorm
    FusedBatchNormV2 FusedBatchNormV3 HSVToRGB ImageProjectiveTransformV3 LRN
    LeakyRelu LogSoftmax MaxPool MaxPool3D MaxPoolV2 RGBToHSV Relu Relu6
    ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    ScaleAndTranslate Selu Sigmoid Softmax Softplus Softsign SpaceToBatch
    SpaceToBatchND SpaceToDepth Tanh
"""
_ARRAYS = """
    Bitcast BroadcastArgs BroadcastTo ConcatOffset Concat ConcatV2 Const
    DynamicPartition DynamicStitch Empty EnsureShape ExpandDims Fill Gather
    GatherNd GatherV2 Identity IdentityN InvertPermutation LowerBound
    MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV3 MatrixDiagV3
    MatrixSetDiagV3 MirrorPad OneHot OnesLike Pack Pad PadV2
    ParallelDynamicStitch PlaceholderWithDefault PreventGradient Rank Reshape
    Reverse ReverseSequence ReverseV2 Roll ScatterNd Select SelectV2 Shape
    ShapeN Size Slice Snapshot Split SplitV Squeeze StopGradient StridedSlice
    TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub
    TensorScatterUpdate Tile Transpose Unique UniqueV2 UniqueWithCounts
    UniqueWithCountsV2 Unpack UpperBound Where ZerosLike
"""
_SPARSE_AND_RAGGED = """
    DenseCountSparseOutput RaggedBincount RaggedCountSparseOutput RaggedGather
    RaggedRange RaggedTensorToSparse RaggedTensorToTensor SparseBincount
    SparseConcat SparseCountSparseOutput SparseFillEmptyRows SparseMatMul
    SparseReduceSum SparseReorder SparseReshape SparseSegmentMean
    SparseSegmentSqrtN SparseSegmentSum SparseSlice SparseTensorDenseMatMul
    SparseToDense
"""
_TEXT = """
    AsString DecodeRaw ReduceJoin RegexFullMatch RegexReplace
    StaticRegexFullMatch StaticRegexReplace StringFormat StringJoin
    StringLength StringLower StringNGrams StringSplit StringSplitV2
    StringStrip StringToHashBucketFast StringToHashBucketStrong
    StringToNumber StringUpper Substr UnicodeDecode UnicodeDecodeWithOffsets
    UnicodeEncode UnicodeTranscode UnsortedSegmentJoin
"""
_LISTS = """
    EmptyTensorList TensorListConcatV2 TensorListElementShape
    TensorListFromTensor TensorListGather TensorListGetItem TensorListLength
    TensorListPopBack TensorListPushBack TensorListReserve TensorListResize
    TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack
"""
# Their functions are in the same file and are looked at like all others.
_CALLS = """
    Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf
    StatelessWhile While
"""
# Fails with a message; nothing else.
_OTHERS = "Assert NoOp"
# On handles that the function is given: the SavedModel's own variables.
_READS = """
    DisableCopyOnRead ReadVariableOp ResourceGather ResourceGatherNd
    VarIsInitializedOp VariableShape
"""
# A vocabulary is made and filled when the model is loaded.
FILE_TABLE = "InitializeTableFromTextFileV2"
_TABLES = f"""
    AnonymousHashTable AnonymousMutableHashTable HashTableV2 {FILE_TABLE}
    InitializeTableV2 LookupTableExportV2 LookupTableFindV2 LookupTableImportV2
    LookupTableSizeV2 MutableHashTableV2
"""


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


# Operations that may run.
RUN = _names(
    *(_ARITHMETIC, _LAYERS, _ARRAYS, _SPARSE_AND_RAGGED, _TEXT, _LISTS),
    *(_CALLS, _OTHERS, _READS, _TABLES),
)
# Besides, in functions that come along and are never called: training, and what
# every SavedModel brings for its saver. All have a state or work on a handle or
# on files, so that TensorFlow evaluates none of them while it imports a
# function.
UNCALLED = RUN | _names(
    """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp
    LookupTableInsertV2 LookupTableRemoveV2 MergeV2Checkpoints Multinomial
    RandomStandardNormal RandomUniform RandomUniformInt RestoreV2
    RngReadAndSkip SaveV2 ShardedFilename StatefulStandardNormalV2
    StatefulUniform TruncatedNormal
    """
)
# Besides, outside functions, where nothing runs once it is loaded as objects.
TOP = UNCALLED | _names("Placeholder VarHandleOp")
