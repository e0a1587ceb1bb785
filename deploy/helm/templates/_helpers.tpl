{{- define "nereid.selector" -}}
app.kubernetes.io/name: nereid
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "nereid.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "nereid.selector" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "nereid.secret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.file -}}
{{ .Release.Name }}-api-keys
{{- else -}}
{{ fail "apiKeys.existingSecret or apiKeys.file is required. Without API keys, every pod of the namespace could use the model." }}
{{- end }}
{{- end }}
