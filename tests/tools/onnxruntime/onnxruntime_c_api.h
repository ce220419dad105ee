// The part of ONNX Runtime's C API that tools/onnx/run_onnx.cpp uses, for tests where its headers
// are not installed: the library of the Python package comes without them.
//
// OrtApi is a table of functions whose order never changes; those that are not used are places
// without a name here. Version 1 of the table is in every ONNX Runtime.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 1

extern "C" {
struct OrtEnv;
struct OrtStatus;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtMemoryInfo;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtAllocator;
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_WARNING = 2 };
enum OrtAllocatorType { OrtArenaAllocator = 1 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7
};

struct OrtApi {
    void* unused_0[2];
    const char* (*GetErrorMessage)(const OrtStatus*);
    OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char*, OrtEnv**);
    void* unused_4[3];
    OrtStatus* (*CreateSession)(const OrtEnv*, const char*, const OrtSessionOptions*, OrtSession**);
    void* unused_8[1];
    OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const*, const OrtValue* const*,
                      size_t, const char* const*, size_t, OrtValue**);
    OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
    void* unused_11[19];
    OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
    void* unused_31[5];
    OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t, OrtAllocator*, char**);
    void* unused_37[12];
    OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void*, size_t,
                                                 const int64_t*, size_t, ONNXTensorElementDataType,
                                                 OrtValue**);
    void* unused_50[1];
    OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
    void* unused_52[8];
    OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
    void* unused_61[3];
    OrtStatus* (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
    OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
    void* unused_66[3];
    OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
    void* unused_70[6];
    OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
    void* unused_77[1];
    OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
    void* unused_79[13];
    void (*ReleaseEnv)(OrtEnv*);
    void (*ReleaseStatus)(OrtStatus*);
    void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
    void (*ReleaseSession)(OrtSession*);
    void (*ReleaseValue)(OrtValue*);
    void* unused_97[2];
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
    void (*ReleaseSessionOptions)(OrtSessionOptions*);
};

struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};

const OrtApiBase* OrtGetApiBase();
}
