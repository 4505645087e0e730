{{- define "llmserve.name" -}}
{{- printf "%s" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "llmserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "llmserve.labels" -}}
{{ include "llmserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "llmserve.watches" -}}
{{- range .Values.engines }}{{ if regexMatch "^(k8s|inferencepool)[:+]" . }}yes{{ end }}{{ end }}
{{- end }}
