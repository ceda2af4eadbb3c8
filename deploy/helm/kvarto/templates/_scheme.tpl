{{/* What each scheme adds to the pod; the same as `kvarto k8s render`, which the tests compare it with.
Helm's numbers are floating point, and a million of them prints as 1e+06: whatever is printed goes through int64. Names
are quoted, since `123` and `on` are names too. */}}

{{/* MiB that a limit must leave: the arena, and on a GPU what the driver takes. */}}
{{- define "kvarto.limitMiB" -}}
{{- if eq .Values.gpu.scheme "cpu" }}{{ int64 .Values.deviceMemoryMiB }}{{ else }}{{ add .Values.deviceMemoryMiB .Values.gpu.overheadMiB }}{{ end }}
{{- end }}

{{/* How many equal parts of the card hold the limit each. */}}
{{- define "kvarto.parts" -}}
{{- $card := int (required (printf "`gpu.scheme: %s` depends on the card: set gpu.cardMiB" .Values.gpu.scheme) .Values.gpu.cardMiB) -}}
{{- $parts := div $card (int (include "kvarto.limitMiB" .)) -}}
{{- if lt (int $parts) 2 }}{{ fail (printf "a card of %d MiB has no two parts of %s MiB; take `gpu.scheme: whole`" $card (include "kvarto.limitMiB" .)) }}{{ end -}}
{{- $parts }}
{{- end }}

{{/* Ceiling of a / b. */}}
{{- define "kvarto.ceil" -}}
{{- $a := int (index . 0) }}{{ $b := int (index . 1) }}{{ div (sub (add $a $b) 1) $b }}
{{- end }}

{{/* MiB that the container may take by its request, where the server has to keep to them by itself. */}}
{{- define "kvarto.grantedMiB" -}}
{{- $limit := int (include "kvarto.limitMiB" .) }}
{{- if has .Values.gpu.scheme (list "time-slicing" "mps") }}{{ div (int .Values.gpu.cardMiB) (int (include "kvarto.parts" .)) }}
{{- else if and (eq .Values.gpu.scheme "aliyun") (eq .Values.gpu.aliyunUnit "GiB") }}{{ mul 1024 (int (include "kvarto.ceil" (list $limit 1024))) }}
{{- else }}{{ $limit }}{{ end }}
{{- end }}

{{- define "kvarto.enforcesNothing" -}}
{{- if has .Values.gpu.scheme (list "time-slicing" "aliyun" "kai" "dra") }}yes{{ end }}
{{- end }}

{{/* Extended resources of the container. */}}
{{- define "kvarto.resources" -}}
{{- $limit := int (include "kvarto.limitMiB" .) }}
{{- $gpu := .Values.gpu }}
{{- if has $gpu.scheme (list "whole" "vgpu") }}
nvidia.com/gpu: 1
{{- else if has $gpu.scheme (list "time-slicing" "mps") }}
nvidia.com/gpu.shared: 1
{{- else if eq $gpu.scheme "mig" }}
nvidia.com/mig-{{ required "`gpu.scheme: mig` needs gpu.migProfile, such as 3g.40gb" $gpu.migProfile }}: 1
{{- else if eq $gpu.scheme "hami" }}
nvidia.com/gpu: 1
nvidia.com/gpumem: {{ include "kvarto.ceil" (list $limit $gpu.memoryFactor) }}
{{- else if eq $gpu.scheme "volcano" }}
volcano.sh/vgpu-number: 1
volcano.sh/vgpu-memory: {{ include "kvarto.ceil" (list $limit $gpu.memoryFactor) }}
{{- else if eq $gpu.scheme "aliyun" }}
aliyun.com/gpu-mem: {{ include "kvarto.ceil" (list $limit (ternary 1 1024 (eq $gpu.aliyunUnit "MiB"))) }}
{{- else if eq $gpu.scheme "tencent" }}
{{- $blocks := int (include "kvarto.ceil" (list $limit 256)) }}
tencent.com/vcuda-core: {{ if $gpu.cardMiB }}{{ min 99 (int (include "kvarto.ceil" (list (mul $blocks 25600) $gpu.cardMiB))) }}{{ else }}10{{ end }}
tencent.com/vcuda-memory: {{ $blocks }}
{{- end }}
{{- end }}

{{- define "kvarto.env" -}}
{{- if eq .Values.gpu.scheme "mps" }}
- name: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT
  value: 0={{ include "kvarto.grantedMiB" . }}M
{{- end }}
{{- if include "kvarto.enforcesNothing" . }}
- name: KVARTO_GPU_MEMORY_LIMIT
  value: {{ include "kvarto.grantedMiB" . }}MiB
{{- end }}
{{- if .Values.gpu.limiter }}
{{- if not (include "kvarto.enforcesNothing" .) }}{{ fail (printf "`gpu.limiter` under `gpu.scheme: %s`, which limits already; leave it out" .Values.gpu.scheme) }}{{ end }}
- name: LD_PRELOAD
  value: /usr/local/lib/libkvarto-limiter.so
{{- end }}
{{- end }}

{{/* A quantity of memory, in GiB where it is whole. */}}
{{- define "kvarto.quantity" -}}
{{- $mib := int . }}{{ if eq (mod $mib 1024) 0 }}{{ div $mib 1024 }}Gi{{ else }}{{ $mib }}Mi{{ end }}
{{- end }}

{{- define "kvarto.selector" -}}
app.kubernetes.io/name: kvarto
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "kvarto.labels" -}}
{{ include "kvarto.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
